"""The account of a run's time: each second of each node belongs to a single use.

Pure. The account takes the events of a run in their order; the result is the same during the run
and afterwards. The uses are those of Google's ml-goodput-measurement (start, wasted progress,
recovery, checkpoints, other), with recovery by phase. Their sum is the time of all present nodes.

Time within a step, such as a wait at the commit gate, counts as training. The seconds of a node
between its last event and a restart of the whole run belong to no use.
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
    # The part of a step before its interruption was noticed.
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
    STANDING_STILL = "standing-still"  # a hang, until it was noticed
    ENDING = "ending"
    SPARE = "spare"  # nodes without a role


# Phase of a recovery -> use.
_USES: Mapping[str, Use] = {
    phase: Use(f"recovery-{phase}")
    for phase in ("close", "decide", "adopt", "rebuild", "restore", "sync", "verify")
}
# The use of the time between the last step and the close of an epoch, by the reason of the close;
# for other reasons INTERRUPTED.
_BEFORE_CLOSE: Mapping[str, Use] = {
    FailureKind.HANG: Use.STANDING_STILL,
    FailureKind.PLANNED: Use.TRAINING,  # a planned close waits for the end of a step
    FailureKind.RESTART: Use.START,
}


@dataclass
class _Stay:
    """The time of a node that belongs to no use yet (wall clock, seconds), from ``since`` on.

    ``until``: when the node left; None while it is present. ``joined_at``: when it last joined. A
    node that has not left joins again after a takeover or a restart of the run.
    """

    since: float
    is_spare: bool
    until: float | None = None
    joined_at: float | None = None

    def is_back(self) -> bool:
        return self.joined_at is not None and self.joined_at >= self.since

    def seconds(self, now: float) -> float:
        return max(0.0, (now if self.until is None else self.until) - self.since)


@dataclass
class Account:
    """The seconds of nodes by use. Not thread-safe."""

    # The seconds whose use will not change any more.
    seconds: dict[Use, float] = field(default_factory=lambda: dict.fromkeys(Use, 0.0))
    stays: dict[int, _Stay] = field(default_factory=dict)
    ended_stays: list[_Stay] = field(default_factory=list)
    # The use of the present seconds, unless a later event changes it.
    current_use: Use = Use.START
    newest: float = 0.0  # the time of the newest event
    closed_at: float = 0.0  # when the epoch was closed; 0 while an epoch is open
    has_waited: bool = False  # for a spare, since the close
    newest_step: int = 0
    is_replaying: bool = False  # from the opening of an epoch to the end of the recovery
    # Whether the first step since the opening was new; None before that step.
    first_is_new: bool | None = None
    # Whether known steps arrive again, as after a takeover.
    is_repeating: bool = False

    def take(self, event: Event) -> None:
        """Add an event. Raises LookupError, TypeError or ValueError for a damaged event."""
        if self.current_use is Use.ENDING and event.kind is not Kind.NODE_JOINED:
            return
        at = event.wall_seconds
        match event.kind:
            case Kind.NODE_JOINED if event.node is not None:
                if self.current_use is Use.ENDING:  # the run continues from its saved state
                    self.current_use = Use.START
                stay = self.stays.setdefault(event.node, _Stay(at, False))
                stay.is_spare, stay.joined_at = bool(event.data.get("spare")), at
            case Kind.NODE_LOST if event.node in self.stays:
                stay = self.stays.pop(event.node)
                stay.until = at
                self.ended_stays.append(stay)
            case Kind.COORDINATOR:
                self.is_repeating = int(event.data.get("term", 1)) > 1
            case Kind.STEP:
                self._step(at, event.iteration or 0)
            case Kind.SEGMENT:
                # The segment took the time since the last step.
                is_save = event.data.get("boundary") == "save"
                self._assign(at, {Use.SAVING if is_save else Use.EVALUATION: 1.0})
            case Kind.EPOCH_CLOSED:
                self._close(at, str(event.data.get("kind", "")))
            case Kind.EPOCH_DECIDED:
                if self.current_use is Use.WAITING_FOR_SPARE:
                    self._assign(at, {self.current_use: 1.0})
                    self.has_waited = True
                    self.closed_at, self.current_use = at, Use.OTHER_RECOVERY
                if "forgotten_from" in event.data:
                    newest = int(event.data["forgotten_from"]) - 1
                    self.newest_step = min(self.newest_step, newest)
            case Kind.EPOCH_OPENED:
                self._open(at, event.data.get("phases", {}))
                for node, stay in self.stays.items() if "spares" in event.data else ():
                    stay.is_spare = node in event.data["spares"]
            case Kind.RECOVERED:
                self._continue(at, event)
            case Kind.WAITING_FOR_SPARE if self.closed_at:
                is_repeated = self.current_use is Use.WAITING_FOR_SPARE  # by another coordinator
                self._assign(at, {self.current_use if is_repeated else Use.CLOSE: 1.0})
                self.current_use = Use.WAITING_FOR_SPARE
            case Kind.RUN_ENDED:
                self._assign(at, {self.current_use if self.closed_at else Use.ENDING: 1.0})
                self.current_use, self.closed_at = Use.ENDING, 0.0
                self.stays.clear()
            case _:
                pass
        self.newest = max(self.newest, at)

    def uses(self, now: float | None = None) -> dict[Use, float]:
        """Return the seconds of all nodes by use, up to the newest event or ``now`` (wall clock).
        Seconds that belong to no use yet count as the present use.
        """
        seconds, until = dict(self.seconds), self.newest if now is None else now
        for stay in [*self.stays.values(), *self.ended_stays]:
            seconds[Use.SPARE if stay.is_spare else self.current_use] += stay.seconds(until)
        return seconds

    def settled(self, until: float | None) -> dict[Use, float]:
        """Return the seconds whose use does not change any more, with those of a wait for a spare
        up to ``until`` (wall clock; None: the newest known time). They never become fewer."""
        self.newest = max(self.newest, until or 0.0)
        if self.current_use is not Use.WAITING_FOR_SPARE:
            return dict(self.seconds)
        waited = self.uses()[self.current_use]
        return {**self.seconds, self.current_use: waited}

    def goodput(self, now: float | None = None) -> float | None:
        """Return the share of the time of nodes with roles that was spent on training; None before
        a node has a role. ``now``: as in :meth:`uses`.
        """
        uses = self.uses(now)
        total = sum(seconds for use, seconds in uses.items() if use is not Use.SPARE)
        return uses[Use.TRAINING] / total if total > 0 else None

    def _assign(self, at: float, shares: Mapping[Use, float]) -> None:
        """Assign the seconds up to ``at`` that belong to no use yet: those of spares to SPARE, the
        others by ``shares``, whose sum is 1."""
        for stay in [*self.stays.values(), *self.ended_stays]:
            seconds = stay.seconds(at)
            if stay.is_spare:
                self.seconds[Use.SPARE] += seconds
            else:
                for use, share in shares.items():
                    self.seconds[use] += share * seconds
            stay.since += seconds
        self.ended_stays.clear()

    def _step(self, at: float, iteration: int) -> None:
        is_new = iteration > self.newest_step
        self.newest_step = max(self.newest_step, iteration)
        self.is_repeating &= not is_new
        # Ignore the step from which a resumed run continues, and steps reported again.
        if self.current_use is Use.START or self.is_repeating:
            return
        if self.is_replaying and self.first_is_new is None:
            self.first_is_new = is_new  # the end of the recovery is reported next
            return
        # If the end of the recovery was not reported before this step, its coordinator was lost.
        self.is_replaying = False
        self._assign(at, {Use.TRAINING if is_new else Use.RECOMPUTED: 1.0})

    def _close(self, at: float, kind: str) -> None:
        """Begin a recovery, or a further recovery, at the close of an epoch."""
        self.is_repeating = False
        if self.closed_at:  # another failure during the recovery
            self._assign(at, {self.current_use: 1.0})
            self.current_use = Use.OTHER_RECOVERY
            return
        if kind == FailureKind.RESTART:  # nodes that did not return after the restart were absent
            self.stays = {node: stay for node, stay in self.stays.items() if stay.is_back()}
            self.ended_stays = [stay for stay in self.ended_stays if stay.is_back()]
            for stay in [*self.stays.values(), *self.ended_stays]:
                stay.since = max(stay.since, stay.joined_at or 0.0)
        self._assign(at, {_BEFORE_CLOSE.get(kind, Use.INTERRUPTED): 1.0})
        self.closed_at, self.current_use = at, Use.OTHER_RECOVERY
        self.has_waited = False
        self.is_replaying = False

    def _open(self, at: float, phases: Mapping[str, float]) -> None:
        """Divide the time since the close by the seconds of the ``phases`` when an epoch opens."""
        if not self.closed_at:
            if self.current_use is Use.START:
                self._assign(at, {Use.START: 1.0})
                self.current_use = Use.TRAINING
            return  # a coordinator that took over repeats the open epoch
        elapsed = max(at - self.closed_at, 1e-9)
        # After a wait for a spare, the seconds before it are assigned already.
        spent = dict(phases) | (dict.fromkeys(("close", "decide"), 0.0) if self.has_waited else {})
        shares = {
            use: max(0.0, float(spent.get(phase, 0.0))) / elapsed for phase, use in _USES.items()
        }
        total = sum(shares.values())
        if total > 1.0:  # phases of different roles overlap a little
            shares = {use: share / total for use, share in shares.items()}
        shares[Use.OTHER_RECOVERY] = max(0.0, 1.0 - total)
        self._assign(at, shares)
        self.closed_at, self.current_use = 0.0, Use.TRAINING
        self.is_replaying, self.first_is_new = True, None

    def _continue(self, at: float, event: Event) -> None:
        """Divide the time since the epoch opened between the steps that were computed again and a
        new step, or only the former, if the first step since then was not new.
        """
        repeated = int(event.data.get("steps_recomputed") or 0)
        new_share = 0.0 if self.first_is_new is False else 1.0 / (repeated + 1)
        self._assign(at, {Use.TRAINING: new_share, Use.RECOMPUTED: 1.0 - new_share})
        self.is_replaying = False
