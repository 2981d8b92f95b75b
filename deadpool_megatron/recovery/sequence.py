"""The worker's side of a recovery: one straight line of stages, each timed and reported.

There is no branching between stages. A stage ends by returning, or by an exception that leaves the
whole line: EpochClosed when a new epoch is closed meanwhile (the line starts again with the next
record), or a failure that is reported and ends in a new close.

The first stage stands apart: it needs no peer and touches no slot, so a member that is still
building when its epoch is closed has nothing to leave and continues building.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import EpochRecord


class Report(Protocol):
    """The listener that is told about stages."""

    def begin_phase(self, phase: str) -> None:
        """The stage begins."""

    def end_phase(self, phase: str, seconds: float) -> None:
        """The stage has ended well, after so long."""


class Stages(ABC):
    """Stages in which a member enters an epoch in a role; the hooks implement it on Megatron."""

    @abstractmethod
    def adopt(self, record: EpochRecord, role: int) -> None:
        """Be built for ``role``: nothing to do for a survivor, a build for a newcomer."""

    @abstractmethod
    def rebuild(self, record: EpochRecord, role: int) -> None:
        """Connect all groups of the epoch."""

    @abstractmethod
    def restore(self, record: EpochRecord, role: int) -> None:
        """Load the chosen generation from verified, sealed bytes."""

    @abstractmethod
    def synchronise(self, record: EpochRecord, role: int) -> None:
        """Derive from peers what was not restored; reset iterators, then random states."""

    @abstractmethod
    def verify(self, record: EpochRecord, role: int) -> None:
        """Compare with peers what must be equal; only then seal the first of a new line."""


def adopt_role(stages: Stages, record: EpochRecord, role: int, report: Report) -> None:
    """The stage that needs nobody else; see the module text."""
    _run("adopt", stages.adopt, record, role, report)


def enter_epoch(stages: Stages, record: EpochRecord, role: int, report: Report) -> None:
    """All further stages in order, among peers."""
    _run("rebuild", stages.rebuild, record, role, report)
    _run("restore", stages.restore, record, role, report)
    _run("sync", stages.synchronise, record, role, report)
    _run("verify", stages.verify, record, role, report)


def _run(
    phase: str,
    stage: Callable[[EpochRecord, int], None],
    record: EpochRecord,
    role: int,
    report: Report,
) -> None:
    report.begin_phase(phase)
    failpoints.set_context(epoch=record.epoch, role=role, section=phase)
    failpoints.hit(f"recovery.{phase}")
    started = time.monotonic()
    stage(record, role)
    report.end_phase(phase, time.monotonic() - started)
