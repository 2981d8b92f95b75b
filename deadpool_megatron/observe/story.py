"""The story of a run: its events folded into a state, of which every display is a view. Pure.

:meth:`Story.take` takes the events in the order of the files; the result is the same during the run
and afterwards. Numbers are exact, and each step occurs once: the first report of a replayed step
counts, unless a number was not finite and the run dropped the step.
"""

from __future__ import annotations

import copy
import itertools
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

from deadpool_megatron.events import Event, Kind, date
from deadpool_megatron.failures import FailureKind, precedence
from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.observe.account import Account
from deadpool_megatron.observe.steps import StepTable

# The phases of a recovery in the order in which they begin, with a text for people; ``reprotect``
# overlaps the later phases.
PHASES: Mapping[str, str] = {
    "detect": "the failure is noticed",
    "close": "all members leave the epoch, vaults freeze",
    "wait": "a node with a role is missing, and no spare has come yet",
    "decide": "seats and restored state are chosen",
    "adopt": "the spare takes the empty roles; at another size all members build",
    "rebuild": "communicators of the new epoch connect",
    "restore": "state is restored from host memory",
    "sync": "parameters come from the data-parallel peers",
    "verify": "peers compare what they must hold equal",
    "reprotect": "until lost copies are made again, at the same time as the others",
    "replay": "the interrupted iteration runs again",
    "abandoned": "a new epoch failed again before its first iteration was finished",
}
_RARE_PHASES = ("wait", "abandoned")
# The pace of training is the median of the newest steps, at most of this many.
RECENT_STEPS = 50
# A loss belongs to the next close of an epoch if it came at most this long before; an earlier loss
# closed no epoch, as that of a spare.
_RELATED_SECONDS = 2.0
# The number of waits at the gate that a story with a limit of steps keeps.
_MAX_WAITS = 64
# All events of these kinds are kept.
_KEPT_KINDS = (Kind.NODE_QUARANTINED, Kind.SLOW_NODE, Kind.DURABLE, Kind.COORDINATOR)
_COUNTED_KINDS = (Kind.REFUSED, Kind.CORRUPTION, Kind.DECODED, Kind.STALE_DIVERGENCE)


@dataclass(frozen=True)
class MemberPhase:
    """A phase of a recovery in a member. ``start`` and ``end``: wall clock, seconds."""

    phase: str
    role: int | None
    node: int | None
    start: float
    end: float


@dataclass
class Interruption:
    """An interruption of training, from the first loss (or planned change) to the next finished
    step. The loss of a coordinator that interrupts nothing has such an object, too.

    Times (``began``, ``ended``) are wall clock, seconds. ``earlier``: the numbers of earlier
    failures and of earlier planned changes. ``closing``: the event that reported the
    interruption. ``closes``: how often an epoch was closed before the run continued; above 1 if a
    further failure happened. ``generation``: (lineage, iteration) of the state from which the run
    continued, once decided. ``exposed_seconds``: time until all copies existed again, as far as
    reported. ``is_cut_short``: the run ended during the interruption, and ``verdict`` is the kind
    of its end, such as ``bug``, if any. The fields after ``is_over`` are known once that is true.
    """

    earlier: tuple[int, int]
    began: float
    closing: Event
    last_iteration: int
    losses: list[Event] = field(default_factory=list)
    stacks: list[Event] = field(default_factory=list)
    hangs: list[Event] = field(default_factory=list)
    closes: int = 1
    parts: list[MemberPhase] = field(default_factory=list)
    opening: Event | None = None
    generation: tuple[int, int] | None = None
    exposed_seconds: float = 0.0
    ended: float | None = None
    is_cut_short: bool = False
    verdict: str = ""
    is_over: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None
    steps_recomputed: int | None = None
    seats_changed: Mapping[int, tuple[object, object]] = field(default_factory=dict)

    @property
    def cause_event(self) -> Event:
        """The event with the likeliest cause that is known so far."""
        return best_cause([self.closing, *self.losses])

    @property
    def kind(self) -> str:
        """The kind with which the run ended, else that of the likeliest cause."""
        return self.verdict or str(self.cause_event.data.get("kind", ""))

    @property
    def cause(self) -> str:
        """The likeliest cause."""
        return str(self.cause_event.data.get("cause", ""))

    @property
    def noticed(self) -> float:
        """The time of the first event of the interruption (wall clock, seconds)."""
        first = min(event.wall_seconds for event in (self.closing, *self.losses))
        return self.began if self.closing.kind is Kind.COORDINATOR else max(self.began, first)

    @property
    def planned(self) -> bool:
        """Return whether the interruption is a planned change or a restart, and no failure."""
        return self.kind in (FailureKind.PLANNED, FailureKind.RESTART)

    @property
    def number(self) -> int:
        """The number of this interruption among the failures, or among the planned changes, from 1
        on."""
        return self.earlier[self.planned] + 1

    def end(self, values: Mapping[str, Any]) -> None:
        """End the interruption with the data of a RECOVERED event."""
        exposed, spent, again = map(values.get, ("exposed_seconds", "seconds", "steps_recomputed"))
        self.phases = ordered_phases(values.get("phases", {}))
        self.generation = _generation(values) or self.generation
        self.seconds = None if spent is None else float(spent)
        self.steps_recomputed = None if again is None else int(again)
        self.exposed_seconds = max(self.exposed_seconds, float(exposed or 0.0))
        self.seats_changed = {
            rank_of(int(role)): (old, new)
            for role, (old, new) in values.get("seats_changed", {}).items()
        }
        self.is_over = True


def by_rank(event: Event) -> Event:
    """Return the event with the role's rank instead of its number, as people know ranks."""
    return replace(event, role=rank_of(event.role)) if event.role else event


class Story:
    """The state of a run; see the module text. ``max_steps``: the number of newest steps to keep,
    about, for a process that lives as long as the run. ``hashes``: keep the hashes of state, too.
    """

    def __init__(self, max_steps: int | None = None, *, hashes: bool = False) -> None:
        self.started: Event | None = None
        self.ended: Event | None = None
        self.exit_status: int | None = None
        self.started_at: float | None = None  # time of the last start
        self.wanted = 0, 0  # nodes with roles, spares
        self.term = 1
        self.epoch = 0
        self.last_iteration = 0  # the newest finished iteration
        self.last_step_at: float | None = None
        self.last_wall = 0.0
        self._term_wall = 0.0  # the date of the newest event of the present coordinator
        self.steps, self._max_steps = StepTable(max_steps), max_steps
        self.evaluations: dict[int, str] = {}  # iteration -> loss
        self.hashes: dict[int, dict[int, str]] | None = {} if hashes else None  # rank -> sha256
        # First iteration with a number of roles -> that number; ascending.
        self.sizes: dict[int, int] = {}
        # Changes of the number of model replicas: wall clock, number before, number after.
        self.changes: list[tuple[float, int, int]] = []
        self.account = Account()
        self.failures: list[Interruption] = []
        # (epoch, iteration) -> seconds of all roles at the commit gate; only the newest waits if
        # the number of steps is limited.
        self.gate_waits: dict[tuple[int, int | None], float] = {}
        self.gate_seconds = 0.0  # sum over all waits
        # Seconds, role and iteration of the longest wait.
        self.longest_wait: tuple[float, int | None, int | None] = (0.0, None, None)
        self.bytes_by_kind: dict[Kind, int] = {}
        self.counts: dict[Kind, int] = {}
        self.refusal: Event | None = None  # the newest
        self.late = 0  # number of messages from epochs that were closed already
        self.audits: list[float] = []  # seconds of each clean audit
        self.lost_nodes: dict[int, Event] = {}  # nodes that have not joined again
        self.drained: set[int] = set()
        self.kept: dict[Kind, list[Event]] = {kind: [] for kind in _KEPT_KINDS}
        self.protections: list[Event] = []
        self.waiting: Event | None = None  # for a spare
        # Losses that closed no epoch, as that of a spare, or of a vault that was started again.
        self.ignored_losses: list[Event] = []
        self.hosts: dict[int, str] = {}  # by node
        self.iterations: int | None = None  # to train in all
        self.sequence_length: int | None = None
        self._pace_after = 0  # steps after this iteration determine the pace
        self._finished_waits: dict[tuple[int, int | None], float] = {}
        # Events that the next failure takes.
        self._losses: list[Event] = []
        self._stacks: list[Event] = []
        self._hangs: list[Event] = []
        self.silence: Event | None = None  # loss of a coordinator, until all agents are back

    def take(self, event: Event) -> None:
        """Add an event. Raises an error of :data:`events.DAMAGE` if it is damaged."""
        event = by_rank(event)
        self.account.take(event)
        last_seen, self.last_wall = self.last_wall, max(self.last_wall, event.wall_seconds)
        if event.kind is not Kind.LOG:  # a log line may have the date of another clock
            newest = 0.0 if event.kind is Kind.COORDINATOR else self._term_wall
            self._term_wall = max(newest, event.wall_seconds)
        self.epoch = max(self.epoch, event.epoch)
        self._count(event)
        match event.kind:
            case Kind.NODE_LOST | Kind.MEMBER_LOST | Kind.VAULT_LOST if self.ended is None:
                self._failure_events("losses", self._losses).append(event)
            case Kind.STACK:
                self._failure_events("stacks", self._stacks).append(event)
            case Kind.HANG:
                self._failure_events("hangs", self._hangs).append(event)
            case Kind.EPOCH_CLOSED:
                self._close(event)
            case Kind.EPOCH_OPENED if self.silence is not None:
                self._end_silence(self.silence)
            case Kind.COORDINATOR:
                self.term = int(event.data.get("term", 1))
                if self.term > 1 and event.epoch and self.ended is None:
                    self.silence = self.silence or self._coordinator_loss(event, last_seen)
            case _:
                self._fold(event, event.data)
        if event.kind in self.kept:
            self.kept[event.kind].append(event)
        if self.failures and self.failures[-1].closing.kind is Kind.EPOCH_CLOSED:
            self._recover(event, self.failures[-1])

    def ahead(self, unwritten: Iterable[Event]) -> Story:
        """Return the story with events that the coordinator could not write, in order. An event
        that is not newer than the story was written meanwhile, as dates do not decrease within a
        term, and is left out."""
        later = self
        for event in unwritten:
            is_new_term = event.kind is Kind.COORDINATOR and int(event.data["term"]) > later.term
            if is_new_term or event.wall_seconds > later._term_wall:
                later = copy.deepcopy(self) if later is self else later
                later.take(event)
        return later

    @property
    def current(self) -> Interruption | None:
        """The failure from which the run is recovering, if any."""
        last = self.failures[-1] if self.failures else None
        return None if last is None or last.is_over or last.is_cut_short else last

    @property
    def all_failures(self) -> list[Interruption]:
        """The failures, with the loss of a coordinator whose successor is taking over."""
        if self.silence is None or self.current is not None or self.ended is not None:
            return self.failures
        at = self.silence.wall_seconds
        loss = Interruption(self._failure_counts(), at, self.silence, self.last_iteration)
        return [*self.failures, loss]

    @property
    def survived(self) -> int:
        """The number of failures that are over, without planned changes."""
        return sum(failure.is_over and not failure.planned for failure in self.failures)

    def has_left(self, loss: Event) -> bool:
        """Return whether a lost node was drained before, and none of its roles failed with it."""
        failed = (failure.losses for failure in self.failures if not failure.planned)
        return loss.node in self.drained and not any(loss in losses for losses in failed)

    @property
    def unrelated_losses(self) -> list[Event]:
        """Losses that have closed no epoch."""
        return [*self.ignored_losses, *self._losses]

    def step_seconds(self, newest: int | None = None) -> list[float]:
        """Return the seconds between successive steps, of all or of the ``newest`` steps. Steps
        during which a failure began are left out.
        """
        steps = self.steps if newest is None else self.steps.newest(newest + 1)
        begins = [failure.began for failure in self.failures]
        seconds = []
        for earlier, later in itertools.pairwise(steps):
            start, end = earlier.wall_seconds, later.wall_seconds
            is_interrupted = bool(begins) and bisect_left(begins, start) < bisect_right(begins, end)
            if not is_interrupted and later.iteration == earlier.iteration + 1:
                seconds.append(end - start)
        return seconds

    def goodput(self, now: float | None) -> float | None:
        """Return :meth:`Account.goodput` once there is a step."""
        return self.account.goodput(now) if len(self.steps) else None

    def replicas(self, now: float | None) -> list[tuple[int, float]]:
        """Return the numbers of model replicas in turn, and the seconds for which the run had each
        number, up to ``now`` (wall clock) or the newest event. Empty if the number never changed.
        """
        ends = [(at, size) for at, size, _ in self.changes]
        ends += [(now or self.last_wall, size) for _, _, size in self.changes[-1:]]
        begins = [self.started_at or 0.0, *(at for at, _ in ends)]
        return [(size, end - begin) for begin, (end, size) in zip(begins, ends, strict=False)]

    def pace(self) -> float | None:
        """Return the median seconds of the newest steps; None if there are too few."""
        recent = self.step_seconds(RECENT_STEPS)
        return statistics.median(recent) if recent else None

    def progress(self) -> dict[str, Any]:
        """Return the values iterations (to train in all), samples_per_second, tokens_per_second
        and seconds_left; None for an unknown value.
        """
        recent = self.steps.newest(RECENT_STEPS + 1)
        recent = [step for step in recent if step.iteration > self._pace_after]
        speed = tokens = seconds_left = None
        if len(recent) > 1 and (seconds := recent[-1].wall_seconds - recent[0].wall_seconds) > 0:
            first, last = recent[0], recent[-1]
            if first.samples is not None and last.samples is not None:
                speed = (last.samples - first.samples) / seconds
                tokens = self.sequence_length and speed * self.sequence_length
            if self.iterations is not None:
                to_do = max(0, self.iterations - self.last_iteration)
                seconds_left = to_do * (seconds / (last.iteration - first.iteration))
        speeds = {"samples_per_second": speed, "tokens_per_second": tokens}
        return {"iterations": self.iterations, **speeds, "seconds_left": seconds_left}

    def _count(self, event: Event) -> None:
        """Count refusals and bytes, and update the nodes."""
        if event.kind is Kind.REFUSED and event.data.get("late"):
            self.late += 1
        elif event.kind in _COUNTED_KINDS:
            self.counts[event.kind] = self.counts.get(event.kind, 0) + 1
            self.refusal = event if event.kind is Kind.REFUSED else self.refusal
        if event.node is not None and event.kind is Kind.NODE_JOINED:
            self.lost_nodes.pop(event.node, None)
            self.hosts[event.node] = str(event.data.get("hostname") or event.data.get("host", ""))
        elif event.node is not None and event.kind is Kind.NODE_LOST and self.ended is None:
            self.lost_nodes[event.node] = event
        if "bytes" in event.data:
            total = self.bytes_by_kind.get(event.kind, 0) + int(event.data["bytes"])
            self.bytes_by_kind[event.kind] = total

    def _fold(self, event: Event, data: Mapping[str, Any]) -> None:
        """Add an event that neither begins nor ends a failure."""
        match event.kind:
            case Kind.RUN_STARTED:
                self.wanted = int(data.get("nodes", 0)), int(data.get("spares", 0))
                self.started = self.started or event
                self.started_at = event.wall_seconds
            case Kind.RUN_ENDED:
                self.ended, self.exit_status = event, int(data.get("exit_status", 0))
                self._cut_short(str(data.get("kind") or ""))
            case Kind.NODE_JOINED if self.ended is not None:
                # The run continues from its saved state.
                self.ended = self.exit_status = None
                self.started_at = event.wall_seconds
            case Kind.TRAINING:
                length = data.get("sequence_length")
                self.iterations = int(data["iterations"])
                self.sequence_length = None if length is None else int(length)
            case Kind.STEP if event.iteration is not None:
                self._step(event, event.iteration)
            case Kind.EVALUATION if event.iteration is not None:
                self.evaluations.setdefault(event.iteration, str(data["loss"]))
            case Kind.STATE_HASH if self.hashes is not None and event.role is not None:
                # After a change of size, the restored state is of an iteration of the former size.
                if (iteration := event.iteration or 0) >= max(self.sizes, default=0):
                    hashes = self.hashes.setdefault(iteration, {})
                    hashes.setdefault(event.role, str(data["sha256"]))
            case Kind.WAITING_FOR_SPARE:
                float(data["limit_seconds"])  # raises here, not in a view
                self.waiting = event
            case Kind.EPOCH_DECIDED:
                self.waiting = None
                if "forgotten_from" in data:
                    self._forget(int(data["forgotten_from"]))
                if "roles" in data and (generation := _generation(data)):
                    first = generation[1] + 1
                    earlier = {k: roles for k, roles in self.sizes.items() if k < first}
                    self.sizes = {**earlier, first: int(data["roles"])}
            case Kind.GATE_WAIT:
                self._take_wait(event)
            case Kind.DRAIN if event.node is not None:
                self.drained.add(event.node)
            case Kind.SIZE:
                sizes = int(data["from"]), int(data["to"])
                self.changes.append((event.wall_seconds, *sizes))
            case Kind.AUDITED:
                self.audits.append(float(data["seconds"]))
            case Kind.SLOW_NODE:
                for name in ("seconds", "peer_seconds"):
                    float(data[name])  # raises here, not in a view
            # A coordinator that took over cannot know whether the plan was reported before.
            case Kind.PROTECTION if [e.data.get("new") for e in self.protections[-1:]] != [
                data.get("new")
            ]:
                self.protections.append(event)
            case _:
                pass

    def _failure_events(self, name: str, pending: list[Event]) -> list[Event]:
        """Return the list ``name`` of the present failure, or ``pending`` for the next failure."""
        events: list[Event] = pending if self.current is None else getattr(self.current, name)
        return events

    def _step(self, event: Event, iteration: int) -> None:
        self.steps.add(iteration, event.data, event.wall_seconds)
        failure = self.current
        if failure is not None and failure.opening is not None and iteration > self.last_iteration:
            if failure.ended is None:
                failure.ended = event.wall_seconds  # the end of the failure is reported next
            else:
                _end_unreported(failure, failure.opening, failure.ended)
        if iteration > self.last_iteration:
            self.last_iteration, self.last_step_at = iteration, event.wall_seconds

    def _forget(self, iteration: int) -> None:
        self.steps.forget_from(iteration)
        self.last_iteration = min(self.last_iteration, iteration - 1)
        self._pace_after = self.last_iteration  # steps may have arrived since the close
        for table in (self.evaluations, self.hashes or {}):
            for later in [k for k in table if k >= iteration]:
                del table[later]

    def _take_wait(self, event: Event) -> None:
        """Add a wait at the gate. Each report, during the wait and at its end, has the seconds
        since the begin of the wait."""
        seconds = float(event.data.get("seconds", 0.0))
        longest = float(event.data.get("longest_seconds", seconds))
        self.longest_wait = max(
            self.longest_wait, (longest, event.role, event.iteration), key=itemgetter(0)
        )
        key = (event.epoch, event.iteration)
        if event.data.get("over"):
            self._finished_waits[key] = seconds = seconds + self._finished_waits.get(key, 0.0)
        previous = self.gate_waits.get(key, 0.0)
        self.gate_waits[key] = max(seconds, previous)
        self.gate_seconds += max(0.0, seconds - previous)
        if self._max_steps is not None and len(self.gate_waits) > _MAX_WAITS:
            oldest = next(iter(self.gate_waits))
            del self.gate_waits[oldest]
            self._finished_waits.pop(oldest, None)

    def _coordinator_loss(self, event: Event, last_seen: float) -> Event:
        """Return an event for the loss of the previous coordinator, at the time of its last event.
        ``event``: the first event of the new coordinator."""
        node = self.kept[Kind.COORDINATOR][-1].node if self.kept[Kind.COORDINATOR] else None
        cause = f"the coordinator on node {'?' if node is None else node} was last heard of at"
        cause += f" {date(last_seen)[11:19]}; node {event.node} took over at"
        cause += f" {date(event.wall_seconds)[11:19]}"
        data = {"kind": FailureKind.COORDINATOR, "cause": cause}
        return Event(Kind.COORDINATOR, event.epoch, node, data=data, wall_seconds=last_seen)

    def _end_silence(self, silence: Event) -> None:
        """End a takeover: all agents have joined the new coordinator, and the epoch is open."""
        if self.current is None and self.ended is None:
            loss = self.all_failures[-1]
            cause = f"{loss.cause}; training was not interrupted"
            loss.closing = replace(silence, data={**silence.data, "cause": cause})
            loss.end({"seconds": 0.0, "steps_recomputed": 0})
            self.failures.append(loss)
        self.silence = None

    def _failure_counts(self) -> tuple[int, int]:
        """Return the numbers of failures and of planned changes."""
        planned = sum(failure.planned for failure in self.failures)
        return len(self.failures) - planned, planned

    def _cut_short(self, verdict: str = "") -> None:
        """End a present failure without a recovery."""
        self.waiting = None
        if self.current is not None:
            self.current.verdict = verdict
            self.current.is_cut_short = True

    def _close(self, event: Event) -> None:
        """Begin a failure at the close of an epoch, or count a further close of a present
        failure."""
        self._pace_after = self.last_iteration  # the time of the next step contains the recovery
        silence, self.silence = self.silence, None
        if event.data.get("kind") == FailureKind.RESTART:
            self.started_at, silence = event.wall_seconds, None
            self._cut_short()
        if self.current is not None:
            self.current.closes += 1
            self.current.opening = self.current.ended = None
            return
        oldest = event.wall_seconds - _RELATED_SECONDS
        related = [loss for loss in self._losses if loss.wall_seconds >= oldest]
        self.ignored_losses += [loss for loss in self._losses if loss.wall_seconds < oldest]
        related += [] if silence is None else [silence]
        if len(self.failures) > 1:
            self.failures[-1].parts.clear()  # parts are many, and only the first failure is drawn
        began = min(entry.wall_seconds for entry in (event, *related))
        evidence = related, self._stacks, self._hangs
        failure = Interruption(self._failure_counts(), began, event, self.last_iteration, *evidence)
        self.failures.append(failure)
        self._losses, self._stacks, self._hangs = [], [], []

    def _recover(self, event: Event, failure: Interruption) -> None:
        """Add an event of a recovery to its failure. Re-protection may end after the run has
        continued."""
        data = event.data
        match event.kind:
            case Kind.EPOCH_DECIDED:
                failure.generation = _generation(data)
                if any(loss.kind is Kind.NODE_LOST for loss in failure.losses):
                    # Copies were missing up to now at least, even if no vault reports a time.
                    failure.exposed_seconds = event.wall_seconds - failure.began
            case Kind.EPOCH_OPENED:
                failure.opening = failure.opening or event  # a new coordinator repeats it
            case Kind.PHASE:
                phase, seconds = event.phase or str(data.get("phase", "")), data.get("seconds", 0.0)
                began = event.wall_seconds - float(seconds)
                failure.parts.append(
                    MemberPhase(phase, event.role, event.node, began, event.wall_seconds)
                )
            case Kind.EXPOSED:
                seconds = float(data.get("seconds", 0.0))
                if not math.isfinite(seconds):
                    raise ValueError("exposed for no time")
                failure.exposed_seconds = max(failure.exposed_seconds, seconds)
            case Kind.RECOVERED:
                failure.end(data)
                failure.ended = event.wall_seconds
                if failure.seconds is not None:
                    # The coordinator knows when the failure began, the story only its first event.
                    # But a coordinator that took over does not know the time before the takeover.
                    failure.began = min(failure.began, event.wall_seconds - failure.seconds)
                    if any(loss.kind is Kind.COORDINATOR for loss in failure.losses):
                        total, phases = event.wall_seconds - failure.began, failure.phases
                        detect = phases.get("detect", 0.0) + total - failure.seconds
                        failure.seconds = total
                        failure.phases = ordered_phases({**phases, "detect": detect})
            case _:
                pass


def best_cause(failures: Sequence[Event]) -> Event:
    """Return the event with the likeliest cause of an epoch's end.

    ``failures``: the event that closed the epoch, then losses. An end on purpose (without a kind),
    a loss in another epoch, and the end of a process without a role are no causes.
    """
    close = failures[0]
    same = (e for e in failures if e.epoch == close.epoch and "kind" in e.data)
    causes = (e for e in same if e.kind is not Kind.MEMBER_LOST or e.role is not None)
    return min(causes, key=lambda event: precedence(str(event.data["kind"])), default=close)


def _end_unreported(failure: Interruption, opening: Event, ended: float) -> None:
    """End a failure without a report: its coordinator was lost after the epoch opened."""
    values = {"phases": opening.data.get("phases", {}), "seconds": ended - failure.began}
    if failure.generation is not None:
        values["steps_recomputed"] = max(0, failure.last_iteration - failure.generation[1])
    failure.end(values)


def _generation(values: Mapping[str, Any]) -> tuple[int, int] | None:
    pair = values.get("generation")
    return (int(pair[0]), int(pair[1])) if pair else None


def ordered_phases(phases: Mapping[str, Any]) -> dict[str, float]:
    """Return phases with their seconds in the order of :data:`PHASES`, then unknown phases. Rare
    phases are left out if they took no time.
    """
    names = [name for name in PHASES if name in phases]
    names += [name for name in phases if name not in PHASES]
    ordered = {name: float(phases[name]) for name in names}
    return {k: seconds for k, seconds in ordered.items() if k not in _RARE_PHASES or seconds > 0}
