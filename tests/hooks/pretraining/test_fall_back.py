"""A checkpoint that a run falls back to leaves every role with the same numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.hooks.pretraining import training_loop as loop_module
from deadpool_megatron.hooks.pretraining.training_loop import PretrainLoop
from tests.hooks.capture.plain_loop import schedule


def decaying(weights_by: float) -> Any:
    groups = SimpleNamespace(param_groups=[{"max_lr": 0.1, "min_lr": 0.0}])
    return schedule(groups, start_wd=weights_by, end_wd=weights_by)


@pytest.mark.parametrize("steps", [0, 9])
@pytest.mark.parametrize("form", ["torch_dist", "torch"])
def test_a_survivor_has_what_the_checkpoint_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, form: str, steps: int
) -> None:
    """Megatron's scheduler sets the groups before it takes the weight decay over; and metadata that
    a process has read of a path, and keeps, may be of what stood there before. Whatever the run
    saves, what is loaded is of the form and iteration that it is of, not of what the tracker
    names."""
    checkpoint = tmp_path / "iter_0000006"
    (checkpoint / ("mp_rank_00" if form == "torch" else ".metadata")).mkdir(parents=True)
    read = ["iter_0000006"]
    reader = ModuleType("reader")
    forgets = {"clear_metadata_cache": read.clear} if form == "torch_dist" else {}
    vars(reader)["CachedMetadataFileSystemReader"] = SimpleNamespace(**forgets)
    monkeypatch.setitem(sys.modules, loop_module._METADATA_READER, reader)
    saved = decaying(0.2)
    saved.step(6)
    packages = {name: ModuleType(name) for name in ("megatron.training", "checkpointing")}
    package, checkpointing = packages.values()
    vars(package)["checkpointing"] = checkpointing
    monkeypatch.setitem(sys.modules, "megatron.training", package)

    def load_checkpoint(*objects: Any, **_: Any) -> tuple[int, float]:
        assert bool(read) == (not forgets)  # of 0.16 it keeps nothing by path
        args = loop._args
        said = args.no_load_optim, args.no_load_rng, args.no_save_optim, args.no_save_rng
        assert (args.ckpt_format, *said) == (form, False, False, False, False)
        assert vars(checkpointing)["read_metadata"]("tracker") == (6, False)
        objects[2].load_state_dict(saved.state_dict())
        return 6, 0.0

    vars(checkpointing)["load_checkpoint"] = load_checkpoint
    survivor = decaying(0.01)
    survivor.step(steps)  # a load adds to what it finds
    names = "load ckpt_step exit_on_missing_checkpoint pretrained_checkpoint finetune"
    names += " no_load_optim no_load_rng no_save_optim no_save_rng ckpt_format"
    loop = SimpleNamespace(
        _args=SimpleNamespace(**dict.fromkeys(names.split())),
        _abandon_saves=lambda: None,
        _places=dict,
        _saves=SimpleNamespace(restore=lambda unfinished: None),
        scheduler=survivor,
        counters={},
        build=SimpleNamespace(objects=([], None, survivor)),
    )
    as_it_is: Any = loop
    PretrainLoop.load_checkpoint(as_it_is, checkpoint)
    assert loop.counters == {"iteration": 6}
    (wanted,), (found,) = saved.optimizer.param_groups, survivor.optimizer.param_groups
    assert (found["lr"], found["weight_decay"]) == (wanted["lr"], wanted["weight_decay"])
    assert survivor.num_steps == 6
