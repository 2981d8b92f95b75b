"""The worker's side of a recovery: one straight line of stages, each timed and reported.

There is no branching between stages. A stage ends by returning, or by an exception that leaves the
whole line: EpochClosed when a new epoch is closed meanwhile (the line starts again with the next
record), or a failure that is reported and ends in a new close.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import EpochRecord

Report = Callable[[str, float], None]


class Stages(ABC):
    """What a member does to enter an epoch in a role; the hooks implement it on Megatron."""

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
        """Compare with peers what must be equal."""


def enter_epoch(stages: Stages, record: EpochRecord, role: int, report: Report) -> None:
    """Run all stages in order; ``report(phase, seconds)`` after each."""
    line = (
        ("adopt", stages.adopt),
        ("rebuild", stages.rebuild),
        ("restore", stages.restore),
        ("sync", stages.synchronise),
        ("verify", stages.verify),
    )
    for phase, stage in line:
        failpoints.set_context(epoch=record.epoch, role=role, section=phase)
        failpoints.hit(f"recovery.{phase}")
        started = time.monotonic()
        stage(record, role)
        report(phase, time.monotonic() - started)
