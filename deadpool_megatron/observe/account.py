"""The account of a run's time: each second of each node belongs to one use.

Pure: fed with the events of a run in their order, live or afterwards, with the same result. The
uses are those of Google's ml-goodput-measurement (start, wasted progress, recovery, checkpoints,
other), with recovery by phase. The sum over all uses is the time for which nodes were there.

Boundaries: time within a step (waits at the commit gate, a slow node) counts as training. The
seconds of a node between its last event and a restart of the whole run belong to no use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.failures import FailureKind


class Use(StrEnum):
    """The use of a second of a node."""

    START = "start"
    TRAINING = "training"
    RECOMPUTED = "recomputed"  # steps that had to be computed again
    # The interrupted part of a step, until the interruption was noticed.
    INTERRUPTED = "interrupted"
    CLOSE = "recovery-close"
    DECIDE = "recovery-decide"
    ADOPT = "recovery-adopt"
    REBUILD = "recovery-rebuild"
    RESTORE = "recovery-restore"
    SYNC = "recovery-sync"
    VERIFY = "recovery-verify"
    OTHER_RECOVERY = "recovery-other"  # between phases, and epochs that failed before they opened
    WAITING_FOR_SPARE = "waiting-for-spare"
    SAVING = "saving"
    EVALUATION = "evaluation"
    STANDING_STILL = "standing-still"  # a hang, until it was found
    ENDING = "ending"
    SPARE = "spare"  # nodes without a role


_OF_PHASE: Mapping[str, Use] = {
    phase: Use(f"recovery-{phase}")
    for phase in ("close", "decide", "adopt", "rebuild", "restore", "sync", "verify")
}
# The use of the time since the last step when an epoch was closed for such a reason.
_BEFORE_CLOSE: Mapping[str, Use] = {
    FailureKind.HANG: Use.STANDING_STILL,
    FailureKind.DRAINED: Use.TRAINING,  # it ends after a step
    FailureKind.RESTART: Use.START,
}


@dataclass
class _Stay:
    """Seconds of a node that belong to no use yet; ``until`` once it has left. ``again``: the time
    at which it joined without having left, with a new coordinator or after a restart of the run.
    """

    since: float
    is_spare: bool
    until: float | None = None
    again: float | None = None

    def is_back(self) -> bool:
        return self.again is not None and self.again >= self.since

    def seconds(self, now: float) -> float:
        return max(0.0, (now if self.until is None else self.until) - self.since)


@dataclass
class Account:
    """The seconds of nodes by use. Not thread-safe."""

    # The seconds whose use will not change any more: they never become fewer.
    seconds: dict[Use, float] = field(default_factory=lambda: dict.fromkeys(Use, 0.0))
    stays: dict[int, _Stay] = field(default_factory=dict)
    left: list[_Stay] = field(default_factory=list)
    # The use of the present seconds, unless a later event changes it.
    now: Use = Use.START
    newest: float = 0.0
    closed_at: float = 0.0
    has_waited: bool = False  # for a spare, since the close
    newest_step: int = 0
    is_replaying: bool = False
    # Whether the first step since the opening was new; None before that step.
    first_is_new: bool | None = None
    # Whether known steps arrive again, as at a coordinator that took over.
    is_repeating: bool = False

    def take(self, event: Event) -> None:
        """Take in an event. Raises LookupError, TypeError or ValueError for a damaged event."""
        if self.now is Use.ENDING and event.kind is not Kind.NODE_JOINED:
            return
        at = event.wall_seconds
        match event.kind:
            case Kind.NODE_JOINED if event.node is not None:
                if self.now is Use.ENDING:  # the run continues from its saved state
                    self.now = Use.START
                stay = self.stays.setdefault(event.node, _Stay(at, False))
                stay.is_spare, stay.again = bool(event.data.get("spare")), at
            case Kind.NODE_LOST if event.node in self.stays:
                stay = self.stays.pop(event.node)
                stay.until = at
                self.left.append(stay)
            case Kind.COORDINATOR:
                self.is_repeating = int(event.data.get("term", 1)) > 1
            case Kind.STEP:
                self._step(at, event.iteration or 0)
            case Kind.SEGMENT:
                # The time between the last step and this event.
                is_save = event.data.get("boundary") == "save"
                self._settle(at, {Use.SAVING if is_save else Use.EVALUATION: 1.0})
            case Kind.EPOCH_CLOSED:
                self._close(at, str(event.data.get("kind", "")))
            case Kind.EPOCH_DECIDED:
                if self.now is Use.WAITING_FOR_SPARE:
                    self._settle(at, {self.now: 1.0})
                    self.has_waited = True
                    self.closed_at, self.now = at, Use.OTHER_RECOVERY
                if "forgotten_from" in event.data:
                    kept = int(event.data["forgotten_from"]) - 1
                    self.newest_step = min(self.newest_step, kept)
            case Kind.EPOCH_OPENED:
                self._open(at, event.data.get("phases", {}))
                for node, stay in self.stays.items() if "spares" in event.data else ():
                    stay.is_spare = node in event.data["spares"]
            case Kind.RECOVERED:
                self._continue(at, event)
            case Kind.WAITING_FOR_SPARE if self.closed_at:
                before = self.now is Use.WAITING_FOR_SPARE  # repeated by another coordinator
                self._settle(at, {self.now if before else Use.CLOSE: 1.0})
                self.now = Use.WAITING_FOR_SPARE
            case Kind.RUN_ENDED:
                self._settle(at, {self.now if self.closed_at else Use.ENDING: 1.0})
                self.now, self.closed_at = Use.ENDING, 0.0
                self.stays.clear()
            case _:
                pass
        self.newest = max(self.newest, at)

    def uses(self, now: float | None = None) -> dict[Use, float]:
        """Return the seconds of all nodes by use, up to the newest event or ``now`` (wall clock);
        undecided seconds count as the present use.
        """
        found, until = dict(self.seconds), self.newest if now is None else now
        for stay in [*self.stays.values(), *self.left]:
            found[Use.SPARE if stay.is_spare else self.now] += stay.seconds(until)
        return found

    def settled(self, until: float | None) -> dict[Use, float]:
        """Return the seconds whose use does not change any more, with those of a wait for a spare
        up to ``until`` (wall clock; None: the newest known time). They never become fewer."""
        self.newest = max(self.newest, until or 0.0)
        if self.now is not Use.WAITING_FOR_SPARE:
            return dict(self.seconds)
        waited = self.uses()[self.now]
        return {**self.seconds, self.now: waited}

    def goodput(self, now: float | None = None) -> float | None:
        """Return the part of the time of nodes with roles in which they made progress; None before
        there is any such time.
        """
        found = self.uses(now)
        used = sum(seconds for use, seconds in found.items() if use is not Use.SPARE)
        return found[Use.TRAINING] / used if used > 0 else None

    def _settle(self, at: float, shares: Mapping[Use, float]) -> None:
        """Divide the seconds that belong to no use yet by ``shares``, whose sum is 1."""
        for stay in [*self.stays.values(), *self.left]:
            seconds = stay.seconds(at)
            if stay.is_spare:
                self.seconds[Use.SPARE] += seconds
            else:
                for use, share in shares.items():
                    self.seconds[use] += share * seconds
            stay.since += seconds
        self.left.clear()

    def _step(self, at: float, iteration: int) -> None:
        is_new = iteration > self.newest_step
        self.newest_step = max(self.newest_step, iteration)
        self.is_repeating &= not is_new
        # The first step of a resumed run was computed before.
        if self.now is Use.START or self.is_repeating:
            return
        if self.is_replaying and self.first_is_new is None:
            self.first_is_new = is_new  # the end of the recovery is reported next
            return
        # No report means that its coordinator was lost, and none will come.
        self.is_replaying = False
        self._settle(at, {Use.TRAINING if is_new else Use.RECOMPUTED: 1.0})

    def _close(self, at: float, kind: str) -> None:
        self.is_repeating = False
        if self.closed_at:  # another failure before the end of the last
            self._settle(at, {self.now: 1.0})
            self.now = Use.OTHER_RECOVERY
            return
        if kind == FailureKind.RESTART:  # nodes that did not return after the restart were absent
            self.stays = {node: stay for node, stay in self.stays.items() if stay.is_back()}
            self.left = [stay for stay in self.left if stay.is_back()]
            for stay in [*self.stays.values(), *self.left]:
                stay.since = max(stay.since, stay.again or 0.0)
        self._settle(at, {_BEFORE_CLOSE.get(kind, Use.INTERRUPTED): 1.0})
        self.closed_at, self.now = at, Use.OTHER_RECOVERY
        self.has_waited = False
        self.is_replaying = False

    def _open(self, at: float, phases: Mapping[str, float]) -> None:
        if not self.closed_at:
            if self.now is Use.START:
                self._settle(at, {Use.START: 1.0})
                self.now = Use.TRAINING
            return  # a coordinator that took over repeats the open epoch
        whole = max(at - self.closed_at, 1e-9)
        spent = dict(phases) | (dict.fromkeys(("close", "decide"), 0.0) if self.has_waited else {})
        shares = {
            use: max(0.0, float(spent.get(phase, 0.0))) / whole for phase, use in _OF_PHASE.items()
        }
        total = sum(shares.values())
        if total > 1.0:  # phases of different roles overlap a little
            shares = {use: share / total for use, share in shares.items()}
        shares[Use.OTHER_RECOVERY] = max(0.0, 1.0 - total)
        self._settle(at, shares)
        self.closed_at, self.now = 0.0, Use.TRAINING
        self.is_replaying, self.first_is_new = True, None

    def _continue(self, at: float, event: Event) -> None:
        """Divide the time since the epoch opened: its last step is new, unless all its steps are
        older than the newest reported step.
        """
        again = int(event.data.get("steps_recomputed") or 0)
        new = 0.0 if self.first_is_new is False else 1.0 / (again + 1)
        self._settle(at, {Use.TRAINING: new, Use.RECOMPUTED: 1.0 - new})
        self.is_replaying = False
