"""The seconds of a recovery: phases from the machine's clock and from members' reports.

Pure. A recovery lasts from the last sign of life before the failure to the first iteration
completed afterwards; another failure in between adds a second cause to the same recovery.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deadpool_megatron.cluster.machine.blame import Failure
from deadpool_megatron.failures import precedence
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.wire.forms import Coded

# This many recoveries are listed when the run ends; the events have all of them.
RECOVERIES_SHOWN = 100
# The phases in their order. ``abandoned``: time in epochs that failed before their first iteration.
PHASES = (
    "detect",
    "close",
    "wait",
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


@dataclass
class RecoveryReport(Coded):
    """A finished recovery: the entry of final.json, and the data of the ``recovered`` event (plus
    ``epoch``). All times in seconds, ``phases`` has every name of PHASES."""

    epoch: int
    cause: str
    kind: str
    generation: Generation
    boundary: str
    phases: dict[str, float]
    seconds: float
    steps_recomputed: int
    exposed_seconds: float
    seats_changed: Mapping[int, tuple[Seat, Seat]]


@dataclass
class Recovery:
    """A recovery in progress. ``started``, ``mark``: when the recovery and its present phase began.
    ``newest``: the newest iteration that was finished before. ``record``: the record of the epoch
    whose end began the recovery. ``phases`` and ``reported``: seconds by the machine's clock and by
    the reports. ``opened_within``: seconds from the decision until the new epoch was open.

    ``kind``: the kind of the first of ``causes``, the likeliest cause of that epoch's end.
    """

    causes: list[str]
    started: float
    mark: float
    newest: int
    record: EpochRecord
    kind: str = ""
    phases: dict[str, float] = field(default_factory=dict)
    reported: dict[str, float] = field(default_factory=dict)
    exposed: float = 0.0
    opened_within: float | None = None

    def spend(self, phase: str, now: float) -> None:
        """Add the time since ``mark`` to a phase."""
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self.mark
        self.mark = now

    def recomputed(self, restore: Restore) -> int:
        """Return how many finished iterations are computed again after this restore."""
        return max(0, self.newest - restore.generation.iteration)

    def reopen(self, cause: str, now: float) -> None:
        """Continue the recovery: its epoch has failed before its first iteration was completed."""
        if self.opened_within is not None:
            self.phases = self.all_phases()
        self.spend("abandoned", now)
        self.causes.append(cause)
        self.reported, self.opened_within = {}, None

    def finish(self, record: EpochRecord, now: float) -> RecoveryReport:
        """Return the report, as the first iteration of ``record``'s epoch is complete."""
        self.spend("replay", now)
        phases = self.all_phases()
        return RecoveryReport(
            epoch=record.epoch,
            cause="; then ".join(self.causes),
            kind=self.kind,
            generation=record.restore.generation,
            boundary=record.restore.boundary,
            phases={phase: phases.get(phase, 0.0) for phase in PHASES},
            seconds=now - self.started,
            steps_recomputed=self.recomputed(record.restore),
            exposed_seconds=self.exposed,
            seats_changed={
                role: (self.record.seats[role], seat)
                for role, seat in record.seats.items()
                if role in self.record.seats and self.record.seats[role] != seat
            },
        )

    def all_phases(self) -> dict[str, float]:
        """Return the seconds of the machine's and the reported phases. Each reported phase has the
        time of its slowest role, and roles work in parallel. So if the sum of the reported times is
        longer than the time until the epoch was open, they are scaled down to it, except for
        re-protection, which is not part of that time."""
        spent = sum(seconds for phase, seconds in self.reported.items() if phase != "reprotect")
        part = min(1.0, (self.opened_within or 0.0) / spent) if spent else 1.0
        phases = dict(self.phases)
        for phase, seconds in self.reported.items():
            scaled = seconds if phase == "reprotect" else seconds * part
            phases[phase] = phases.get(phase, 0.0) + scaled
        return phases


@dataclass
class Recoveries:
    """Recoveries of the run. ``current``: the recovery in progress. ``finished``: the newest
    reports of this coordinator. ``count``, ``steps_recomputed``: totals of the whole run."""

    current: Recovery | None = None
    finished: list[RecoveryReport] = field(default_factory=list)
    count: int = 0
    steps_recomputed: int = 0

    def close(
        self, failure: Failure, sign_at: float, now: float, newest: int, record: EpochRecord
    ) -> None:
        """Note that the epoch of ``record`` is closed. ``sign_at``: when the first sign of the
        failure came, or the last sign of life; ``newest``: the newest finished iteration."""
        if self.current is not None:
            self.current.reopen(failure.cause, now)
            return
        started = min(sign_at, now)
        detect, kind = {"detect": now - started}, str(failure.kind)
        self.current = Recovery([failure.cause], started, now, newest, record, kind, detect)

    def add_cause(self, failure: Failure) -> None:
        """Add a cause to the recovery in progress: in first place if it is likely to have caused
        the failure that is there."""
        if (recovery := self.current) is None:
            return
        is_later = "abandoned" in recovery.phases
        if not is_later and precedence(failure.kind) < precedence(recovery.kind):
            recovery.causes.insert(0, failure.cause)
            recovery.kind = str(failure.kind)
        else:
            recovery.causes.append(failure.cause)

    def spend(self, phase: str, now: float) -> None:
        """End a phase of the recovery in progress."""
        if self.current is not None:
            self.current.spend(phase, now)

    def open(self, now: float) -> None:
        """Note that every role has restored."""
        if self.current is not None:
            self.current.opened_within = now - self.current.mark
            self.current.mark = now

    def finish(self, record: EpochRecord, now: float) -> RecoveryReport | None:
        """End the recovery in progress, as the first iteration of ``record``'s epoch is complete,
        and return its report. Return None if there is no recovery."""
        if self.current is None:
            return None
        report, self.current = self.current.finish(record, now), None
        self.finished = [*self.finished, report][-RECOVERIES_SHOWN:]
        self.count += 1
        self.steps_recomputed += report.steps_recomputed
        return report

    def report(self, epoch: int, phase: str, seconds: float, exposed: float, active: int) -> None:
        """Note the time of a member or vault in a phase in ``epoch``. Members work in parallel, so
        the longest time counts. ``active``: the epoch that is not closed, if any. ``exposed``: how
        long state lacked protection. A phase that is not in PHASES is part of another phase. Only
        re-protection may end after the recovery."""
        if self.current is not None and epoch == active:
            phases = self.current.reported
            self.current.exposed = max(self.current.exposed, exposed)
        elif self.finished and self.finished[-1].epoch == epoch and phase == "reprotect":
            phases, last = self.finished[-1].phases, self.finished[-1]
            last.exposed_seconds = max(last.exposed_seconds, exposed)
        else:
            return
        if phase in PHASES:
            phases[phase] = max(seconds, phases.get(phase, 0.0))
