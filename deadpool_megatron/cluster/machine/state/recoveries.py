"""The seconds of a recovery: phases from the machine's clock and from members' reports.

Pure. A recovery lasts from the last sign of life of what failed to the first iteration completed
afterwards; when another failure comes in between, it is one recovery with two causes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat

# So many recoveries are told one by one when the run ends; the events have all of them.
RECOVERIES_SHOWN = 100
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
        """Return how many finished iterations are computed again from there."""
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


@dataclass(frozen=True)
class Recoveries:
    """``current``: in progress. ``finished``: the newest that this coordinator saw. ``count``,
    ``steps_recomputed``: of the whole run."""

    current: Recovery | None = None
    finished: tuple[RecoveryReport, ...] = ()
    count: int = 0
    steps_recomputed: int = 0

    def closed(
        self, failure: Failure, signs: float, now: float, newest: int, record: EpochRecord
    ) -> Recoveries:
        """Returns the recoveries after the epoch of ``record`` was closed now; the first sign of
        the failure (or the last one of life) was at ``signs``."""
        if self.current is not None:
            return replace(self, current=self.current.again(failure.cause, now))
        started = min(signs, now)
        detect, kind = {"detect": now - started}, str(failure.kind)
        begun = Recovery((failure.cause,), started, now, newest, record.seats, kind, detect)
        return replace(self, current=begun)

    def with_cause(self, cause: str) -> Recoveries:
        """Returns the recoveries with one more cause of the one in progress."""
        known = self.current and replace(self.current, causes=(*self.current.causes, cause))
        return replace(self, current=known)

    def spent(self, phase: str, now: float) -> Recoveries:
        """Returns the recoveries after a phase of the one in progress."""
        return replace(self, current=self.current and self.current.spend(phase, now))

    def opened(self, now: float) -> Recoveries:
        """Returns the recoveries after every role has restored."""
        known = self.current and replace(self.current, mark=now, opened=True)
        return replace(self, current=known)

    def with_finished(self, report: RecoveryReport) -> Recoveries:
        """Returns the recoveries after the one in progress is complete."""
        return Recoveries(
            None,
            (*self.finished, report)[-RECOVERIES_SHOWN:],
            self.count + 1,
            self.steps_recomputed + report.steps_recomputed,
        )

    def reported(
        self, record: EpochRecord | None, epoch: int, phase: str, seconds: float, exposed: float
    ) -> Recoveries:
        """Returns the recoveries with what a member or vault of ``epoch`` says of one phase.

        ``record``: the announced one. ``exposed``: how long something lacked protection.
        """
        if self.current is not None:
            if record is None or epoch != record.epoch:
                return self
            known = self.current.report(phase, seconds)
            return replace(self, current=replace(known, exposed=max(known.exposed, exposed)))
        if not self.finished or self.finished[-1].epoch != epoch:
            return self
        *earlier, last = self.finished
        last = last.with_phase(phase, seconds)
        last = replace(last, exposed_seconds=max(last.exposed_seconds, exposed))
        return replace(self, finished=(*earlier, last))
