"""Events put together to what happened: steps, failures, waits. Pure; used live and afterwards."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from deadpool_megatron.cli.show.numbers import StepTable
from deadpool_megatron.cli.show.run_result import FinishedRecovery
from deadpool_megatron.cluster.coordinator.reporting.accounting import Account
from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.events import Event, Kind

# A loss belongs to the next closing of an epoch when it came at most this long before it; else it
# was a loss that the run could ignore (a spare).
_RELATED_SECONDS = 2.0
_COUNTED = frozenset(
    {
        Kind.REFUSED,
        Kind.CORRUPTION,
        Kind.DECODED,
        Kind.REPLAYED,
        Kind.STALE_DIVERGENCE,
    }
)


@dataclass(frozen=True)
class MemberPhase:
    """One member's part of a recovery; wall clock, seconds."""

    phase: str
    role: int | None
    node: int | None
    start: float
    end: float


@dataclass
class Interruption:
    """One interruption, from the first loss (or planned swap) to the next finished step.

    ``recovery`` is None while it lasts. ``closes`` counts how often an epoch was closed before the
    run continued: above 1 when something else failed meanwhile. Times are wall clock, seconds.
    """

    number: int
    began: float
    closed_epoch: int
    cause: str
    last_iteration: int
    kind: str = ""
    planned: bool = False
    closes: int = 1
    losses: list[Event] = field(default_factory=list)
    decided: Event | None = None
    opened: Event | None = None
    parts: list[MemberPhase] = field(default_factory=list)
    stacks: list[Event] = field(default_factory=list)
    hangs: list[Event] = field(default_factory=list)
    nccl_logs: list[str] = field(default_factory=list)
    recovery: FinishedRecovery | None = None
    ended: float | None = None
    exposed_seconds: float = 0.0

    @property
    def generation(self) -> tuple[int, int] | None:
        """(lineage, iteration) of the state the run continued from, once decided."""
        if self.recovery is not None and self.recovery.generation is not None:
            return self.recovery.generation
        found = self.decided.data.get("generation") if self.decided is not None else None
        return (int(found[0]), int(found[1])) if found else None

    @property
    def exposure(self) -> float:
        """Seconds until every state had its copies again, as far as reported."""
        reported = self.recovery.exposed_seconds if self.recovery is not None else None
        return max(self.exposed_seconds, reported or 0.0)


@dataclass
class Story:
    """The story that a run's events tell so far; feed it with :meth:`add`, in the order of the
    file."""

    started: Event | None = None
    ended: Event | None = None
    epoch: int = 0
    steps: StepTable = field(default_factory=StepTable)
    failures: list[Interruption] = field(default_factory=list)
    ignored_losses: list[Event] = field(default_factory=list)
    # Seconds over all roles, by epoch and iteration; and the longest of one role, its role and its
    # iteration.
    gate_waits: dict[tuple[int, int | None], float] = field(default_factory=dict)
    longest_wait: tuple[float, int | None, int | None] = (0.0, None, None)
    _waits_over: dict[tuple[int, int | None], float] = field(default_factory=dict)
    counts: dict[Kind, int] = field(default_factory=dict)
    aside: list[Event] = field(default_factory=list)
    slow: list[Event] = field(default_factory=list)
    # Seconds of each audit that has found nothing.
    audits: list[float] = field(default_factory=list)
    protections: list[Event] = field(default_factory=list)
    durable: list[Event] = field(default_factory=list)
    coordinators: list[Event] = field(default_factory=list)
    bytes_by_kind: dict[Kind, int] = field(default_factory=dict)
    account: Account = field(default_factory=Account)
    last_wall: float = 0.0
    _losses: list[Event] = field(default_factory=list)
    _stacks: list[Event] = field(default_factory=list)
    _hangs: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take in one event; a damaged one raises LookupError, TypeError, ValueError,
        AttributeError or OverflowError."""
        self.account.add(event)
        self.last_wall = max(self.last_wall, event.wall_seconds)
        self.epoch = max(self.epoch, event.epoch)
        if event.kind in _COUNTED:
            self.counts[event.kind] = self.counts.get(event.kind, 0) + 1
        if "bytes" in event.data:
            total = self.bytes_by_kind.get(event.kind, 0) + int(event.data["bytes"])
            self.bytes_by_kind[event.kind] = total
        match event.kind:
            case Kind.RUN_STARTED:
                self.started = self.started or event
            case Kind.RUN_ENDED:
                self.ended = event
            case Kind.NODE_JOINED:
                self.ended = None  # the run goes on from what it had saved
            case Kind.STEP:
                self._add_step(event)
            case Kind.NODE_LOST | Kind.MEMBER_LOST | Kind.VAULT_LOST:
                self._add_loss(event)
            case Kind.EPOCH_CLOSED:
                self._close(event)
            case Kind.STACK if self.current is None:
                self._stacks.append(event)
            case Kind.HANG if self.current is None:
                self._hangs.append(event)
            case Kind.GATE_WAIT:
                self._add_wait(event)
            case Kind.NODE_ASIDE:
                self.aside.append(event)
            case Kind.AUDITED:
                self.audits.append(float(event.data["seconds"]))
            case Kind.SLOW_NODE:
                for name in ("seconds", "peer_seconds"):
                    float(event.data[name])  # raises here, and not where it is told
                self.slow.append(event)
            case Kind.PROTECTION if not self._is_said(event):
                self.protections.append(event)
            case Kind.DURABLE:
                self.durable.append(event)
            case Kind.COORDINATOR:
                self.coordinators.append(event)
            case _:
                self._add_to_failure(event)

    def _add_wait(self, event: Event) -> None:
        """A wait is reported while it lasts and at its end, each time as a whole."""
        key, seconds = (event.epoch, event.iteration), float(event.data.get("seconds", 0.0))
        longest = float(event.data.get("longest_seconds", seconds))
        self.longest_wait = max(
            self.longest_wait, (longest, event.role, event.iteration), key=itemgetter(0)
        )
        if event.data.get("over"):
            self._waits_over[key] = seconds = seconds + self._waits_over.get(key, 0.0)
        self.gate_waits[key] = max(seconds, self.gate_waits.get(key, 0.0))

    @property
    def last_iteration(self) -> int:
        """The newest finished iteration."""
        return self.steps.last_iteration

    @property
    def current(self) -> Interruption | None:
        """The failure the run is recovering from, if any."""
        last = self.failures[-1] if self.failures else None
        return last if last is not None and last.recovery is None else None

    @property
    def unrelated_losses(self) -> list[Event]:
        """Losses that closed no epoch: a spare, a vault that was started again."""
        return [*self.ignored_losses, *self._losses]

    def step_seconds(self, newest: int | None = None) -> list[float]:
        """Time of each step from the one before it, or of so many newest ones; steps struck by a
        failure left out.
        """
        timed = self.steps.times(None if newest is None else newest + 1)
        began = [failure.began for failure in self.failures]
        found = []
        for (k, before), (following, after) in itertools.pairwise(timed):
            struck = bool(began) and bisect_left(began, before) < bisect_right(began, after)
            if not struck and following == k + 1:
                found.append(after - before)
        return found

    def _is_said(self, event: Event) -> bool:
        """A coordinator that took over cannot know whether the one before had told the plan."""
        return bool(self.protections) and (
            self.protections[-1].data.get("new") == event.data.get("new")
        )

    def _add_step(self, event: Event) -> None:
        if event.iteration is None:
            return
        failure = self.current
        is_new = event.iteration > self.last_iteration
        if failure is not None and failure.opened is not None and is_new:
            if failure.ended is None:
                failure.ended = event.wall_seconds  # that it is over is told next
            else:
                _end_untold(failure)
        self.steps.add(event.iteration, event.data, event.wall_seconds)

    def _add_loss(self, event: Event) -> None:
        if self.ended is not None:
            return  # nodes that leave because the run is over
        if self.current is not None:
            self.current.losses.append(event)
        else:
            self._losses.append(event)

    def _close(self, event: Event) -> None:
        if self.current is not None:
            self.current.closes += 1
            self.current.opened = self.current.ended = None
            return
        related = [
            loss
            for loss in self._losses
            if event.wall_seconds - loss.wall_seconds <= _RELATED_SECONDS
        ]
        self.ignored_losses += [loss for loss in self._losses if loss not in related]
        if len(self.failures) > 1:
            self.failures[-1].parts.clear()  # one for each role; the first failure is drawn
        self.failures.append(
            Interruption(
                number=len(self.failures) + 1,
                began=min(entry.wall_seconds for entry in (event, *related)),
                closed_epoch=event.epoch,
                cause=str(event.data.get("cause", "")),
                last_iteration=self.last_iteration,
                kind=str(event.data.get("kind", "")),
                planned=event.data.get("kind") == FailureKind.DRAINED,
                losses=related,
                stacks=self._stacks,
                hangs=self._hangs,
            )
        )
        self._losses, self._stacks, self._hangs = [], [], []

    def _add_to_failure(self, event: Event) -> None:
        """Events of a recovery; re-protection and its exposure may end after the run continued."""
        if not self.failures:
            return
        failure = self.failures[-1]
        match event.kind:
            case Kind.EPOCH_DECIDED:
                failure.decided = event
                forgotten = event.data.get("forgotten_from")
                if forgotten is not None:
                    self.steps.forget_from(int(forgotten))
            case Kind.EPOCH_OPENED:
                failure.opened = failure.opened or event  # a coordinator that took over repeats it
            case Kind.STACK:
                failure.stacks.append(event)
            case Kind.HANG:
                failure.hangs.append(event)
            case Kind.NCCL_REPORT:
                failure.nccl_logs.append(str(event.data["log"]))
            case Kind.PHASE:
                failure.parts.append(_member_phase(event))
            case Kind.EXPOSED:
                seconds = float(event.data.get("seconds", 0.0))
                if not math.isfinite(seconds):
                    raise ValueError("exposed for no time")
                failure.exposed_seconds = max(failure.exposed_seconds, seconds)
            case Kind.RECOVERED:
                values: dict[str, Any] = {"cause": failure.cause, "epoch": event.epoch}
                failure.recovery = FinishedRecovery.from_dict({**values, **event.data})
                failure.ended = event.wall_seconds
                if failure.recovery.seconds is not None:
                    # The coordinator knows when it began; we only when it was heard of.
                    began = event.wall_seconds - failure.recovery.seconds
                    failure.began = min(failure.began, began)
            case _:
                pass


def _end_untold(failure: Interruption) -> None:
    """Nobody tells that it is over: its coordinator was lost behind the opening."""
    assert failure.opened is not None
    assert failure.ended is not None
    values: dict[str, Any] = {
        "epoch": failure.opened.epoch,
        "cause": failure.cause,
        "generation": failure.generation,
        "phases": failure.opened.data.get("phases", {}),
        "seconds": failure.ended - failure.began,
    }
    if failure.generation is not None:
        values["steps_recomputed"] = max(0, failure.last_iteration - failure.generation[1])
    failure.recovery = FinishedRecovery.from_dict(values)


def _member_phase(event: Event) -> MemberPhase:
    seconds = float(event.data.get("seconds", 0.0))
    return MemberPhase(
        phase=str(event.phase or event.data.get("phase", "")),
        role=event.role,
        node=event.node,
        start=event.wall_seconds - seconds,
        end=event.wall_seconds,
    )


def summary(values: Sequence[float]) -> dict[str, float]:
    """Untrimmed mean, p50, p95, p99, least and most of ``values``; only ``count`` for none.

    Percentiles are the nearest-rank ones: values that did occur.
    """
    if not values:
        return {"count": 0}
    ranked = sorted(values)

    def percentile(percent: int) -> float:
        return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]

    return {
        "count": len(ranked),
        "mean": statistics.fmean(ranked),
        "p50": percentile(50),
        "p95": percentile(95),
        "p99": percentile(99),
        "min": ranked[0],
        "max": ranked[-1],
    }
