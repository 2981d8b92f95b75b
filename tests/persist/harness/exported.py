"""Exports and saves of made-up checkpoints that become valid."""

from pathlib import Path

from deadpool_megatron.cluster.coordinator import new_checkpoint
from deadpool_megatron.cluster.coordinator.new_checkpoint import NewCheckpoint
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.layout.records import Generation, Restore


def saved_at(iteration: int, path: Path) -> Restore:
    return Restore("durable", Generation(1, iteration), "save", str(path))


def exported(run: RunDirectory, folder: Path, iteration: int, keep: int | None = None) -> Path:
    """Publish an export; with ``keep``, prune older exports to that number."""
    final = folder / f"iter_{iteration:07d}"
    unfinished = new_checkpoint.run_files.unfinished_export(folder, "run", "1.1")
    unfinished.mkdir(parents=True)
    (unfinished / ".metadata").touch()
    NewCheckpoint(unfinished, final, saved_at(iteration, final), run, "run").publish()
    if keep is not None:
        new_checkpoint.list_and_prune(run, "run", final, keep, ())
    return final
