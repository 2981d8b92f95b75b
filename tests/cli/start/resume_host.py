"""A host whose agent resumes a run, for calls/resume.txt."""

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli.start import resume
from deadpool_megatron.cli.start.resume import PeerAgents, resume_point
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.settings import Settings

INFO = RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings())


class Host:
    """A resuming agent of node 0, with a checkpoint of iteration 5 and half of generation 1:7."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.old, self.new = RunDirectory(directory / "old"), RunDirectory(directory / "new")
        self.old.create(INFO)
        self.looks, self.pauses, self.dumped = 0, 0, [0, 1, 1_000_000]
        self.others = PeerAgents(self.new, 2, 0, 60.0)
        self.args = argparse.Namespace(nodes=2, nproc_per_node=1)
        self.saved = directory / "checkpoint"
        self.saved.mkdir()
        (self.saved / ".metadata").touch()
        self.notes(self.state("durable", 5))
        patch.setattr(resume, "dump_orphans", lambda *_: [])
        patch.setattr(resume, "newest_whole", self._look)
        patch.setattr(resume.time, "sleep", self._pause)

    def state(self, kind: str, iteration: int, path: Path | None = None) -> Restore:
        return Restore(kind, Generation(1, iteration), path=str(path or self.saved))

    def notes(self, *states: Restore) -> None:
        """What the run has said last."""
        run_files.write_json(self.old.latest, {"valid": [one.to_dict() for one in states]})

    def record(self, history: History, roles: Collection[int] = range(2)) -> EpochRecord:
        seats = {role: Seat(number, 0, 0) for number, role in enumerate(roles)}
        return EpochRecord(2, seats, {}, self.state("initial", 0), history=history)

    def resumes(self, others: PeerAgents | None = None) -> list[str]:
        found, first = resume_point(self.old, self.args, others)
        roles = f", roles from {first}" if first else ""
        return [f"{s.kind} {s.generation.iteration} {Path(s.path).name}{roles}" for s in found]

    def _look(self, _: Path, roles: Collection[int], *__: object) -> Any:
        self.looks += 1
        if not set(roles) <= set(self.dumped):
            return None, [f"generation 1:7 lacks role {min(roles)}"]
        whole = Restore("dump", Generation(1, 7), path="dump/1-7")
        return (whole, []) if self.pauses else (None, ["generation 1:7 lacks role 1"])

    def _pause(self, _: float) -> None:
        """Node 1 has written its half."""
        self.pauses += 1
        PeerAgents(self.new, 2, 1, 60.0).report_done()
