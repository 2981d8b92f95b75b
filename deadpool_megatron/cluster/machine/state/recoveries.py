"""Where the time of a recovery went: phases from the machine's clock and from members' reports.

Pure. A recovery lasts from the last sign of life of what failed to the first iteration completed
afterwards; when another failure comes in between, it is one recovery with two causes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat

# In the order they happen; ``abandoned`` is time in epochs that were opened but failed again.
PHASES = (
    "detect",
    "close",
    "decide",
    "adopt",
    "rebuild",
    "restore",
    "sync",
    "verify",
    "reprotect",
    "replay",
    "abandoned",
)


@dataclass(frozen=True)
class RecoveryReport:
    """A finished recovery; all times in seconds, ``phases`` has every name of PHASES."""

    epoch: int
    cause: str
    kind: str
    generation: Generation
    boundary: str
    phases: Mapping[str, float]
    seconds: float
    steps_recomputed: int
    exposed_seconds: float
    seats_changed: Mapping[int, tuple[Seat, Seat]]

    def to_dict(self) -> dict[str, Any]:
        """The entry of final.json, and the data of the ``recovered`` event (plus ``epoch``)."""
        return {
            "epoch": self.epoch,
            "cause": self.cause,
            "kind": self.kind,
            "generation": self.generation.to_list(),
            "boundary": self.boundary,
            "phases": dict(self.phases),
            "seconds": self.seconds,
            "steps_recomputed": self.steps_recomputed,
            "exposed_seconds": self.exposed_seconds,
            "seats_changed": {
                str(role): [old.to_list(), new.to_list()]
                for role, (old, new) in self.seats_changed.items()
            },
        }

    def with_phase(self, phase: str, seconds: float) -> RecoveryReport:
        """A report of this recovery that came late; the longest counts."""
        if phase not in PHASES:
            return self
        longest = max(seconds, self.phases.get(phase, 0.0))
        return replace(self, phases={**self.phases, phase: longest})


@dataclass(frozen=True)
class Recovery:
    """A recovery in progress. ``mark``: when its present phase of the machine began.

    ``kind``: of the first failure, a value of FailureKind.
    """

    causes: tuple[str, ...]
    started: float
    mark: float
    newest: int
    seats: Mapping[int, Seat]
    kind: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    reported: Mapping[str, float] = field(default_factory=dict)
    exposed: float = 0.0
    opened: bool = False

    def spend(self, phase: str, now: float) -> Recovery:
        """Book the time since ``mark`` on a phase."""
        total = self.phases.get(phase, 0.0) + now - self.mark
        return replace(self, phases={**self.phases, phase: total}, mark=now)

    def report(self, phase: str, seconds: float) -> Recovery:
        """Take one member's report: members work in parallel, so the longest counts."""
        if phase not in PHASES:
            return self  # part of another phase, as draining is of the close
        longest = max(seconds, self.reported.get(phase, 0.0))
        return replace(self, reported={**self.reported, phase: longest})

    def recomputed(self, restore: Restore) -> int:
        """How many finished iterations are computed again from there."""
        return max(0, self.newest - restore.generation.iteration)

    def again(self, cause: str, now: float) -> Recovery:
        """The epoch it led to has failed before its first iteration was completed."""
        phases = dict(self.phases)
        if self.opened:
            for phase, seconds in self.reported.items():
                phases[phase] = phases.get(phase, 0.0) + seconds
        spent = replace(self, phases=phases).spend("abandoned", now)
        return replace(spent, causes=(*self.causes, cause), reported={}, opened=False)

    def finish(self, record: EpochRecord, now: float) -> RecoveryReport:
        """The first iteration of ``record``'s epoch is complete."""
        spent = self.spend("replay", now)
        phases = dict.fromkeys(PHASES, 0.0) | dict(spent.phases)
        for phase, seconds in spent.reported.items():
            phases[phase] = phases.get(phase, 0.0) + seconds
        return RecoveryReport(
            epoch=record.epoch,
            cause="; then ".join(self.causes),
            kind=self.kind,
            generation=record.restore.generation,
            boundary=record.restore.boundary,
            phases=phases,
            seconds=now - self.started,
            steps_recomputed=self.recomputed(record.restore),
            exposed_seconds=self.exposed,
            seats_changed={
                role: (self.seats[role], seat)
                for role, seat in record.seats.items()
                if role in self.seats and self.seats[role] != seat
            },
        )


def begin(
    causes: tuple[str, ...],
    signs: float,
    now: float,
    newest: int,
    seats: Mapping[int, Seat],
    kind: str = "",
) -> Recovery:
    """A recovery whose first sign (or last sign of life) was at ``signs``; the close is now."""
    started = min(signs, now)
    detect = {"detect": now - started}
    return Recovery(causes, started, now, newest, seats, kind, detect)
