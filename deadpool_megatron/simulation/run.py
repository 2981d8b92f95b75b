"""A run on a trace of failures, by one way to recover: the fast model, with mean times of phases.

All stop at a failure, or only one model replica does (``Policy.offline``). A second failure during
a recovery begins it again. Pure.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from deadpool_megatron.simulation.hazards import NODE, WRONG, Failure, Trace
from deadpool_megatron.simulation.job import SETTLE, SIGNS, SPARE_TIMEOUT, Job, best_interval


class Policy(NamedTuple):
    """A way to recover; times in seconds.

    ``speed``: useful share of the time in which the run trains. ``stalls``: for each sign, from a
    failure until training continues, with a spare. ``interval``: between states to return to;
    ``delay``: until such a state is complete. ``is_hot``: the state lies in the memory of other
    nodes. ``late_after``, ``late``: a longer wait for a node ends the job, which then needs this
    much to continue. ``change``: seconds of a change of the number of replicas; 0: it is fixed.
    ``offline``: 0 if all stop at a failure; else the seconds without a replica that fails, whose
    return stops the others for ``rejoin``.
    """

    name: str
    speed: float
    stalls: Mapping[str, float]
    interval: float
    delay: float
    is_hot: bool = False
    late_after: float = math.inf
    late: float = 0.0
    change: float = 0.0
    offline: float = 0.0
    rejoin: float = 0.0


@dataclass
class Outcome:
    """The result of a run. ``useful``: seconds of training at full size that were kept;
    ``recoveries``: seconds of each interruption; ``lost``: seconds of training computed again after
    each failure; ``waited``, ``reduced``: seconds without enough nodes, and at a smaller size;
    ``absent``: mean number of nodes in repair; ``ends``: events that cost a job its state or its
    allocation."""

    seconds: float
    useful: float = 0.0
    recoveries: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    waited: float = 0.0
    reduced: float = 0.0
    absent: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)

    @property
    def ettr(self) -> float:
        """Return the effective training time ratio."""
        return self.useful / self.seconds


def policies(job: Job, per_second: float) -> list[Policy]:
    """Return all ways to recover, for failures of a node at this rate. Intervals are the best."""
    mtbf, value = 1 / (per_second * job.nodes), job.values
    step, every = job.timing.step_seconds, job.plan.protection.cadence
    # A generation that leaves a node costs the same, for other nodes or for storage.
    moved = value["overhead"] * step
    sync, cost = best_interval(job.save, mtbf), job.copy + moved
    background = max(job.save, best_interval(cost, mtbf))
    saved = background / (background + cost), background, job.save
    cadence = max(1, round(best_interval(moved, mtbf) / step))

    def stalls(seconds: float) -> dict[str, float]:
        return {sign: job.detect(sign) + seconds for sign in SIGNS}

    def hot(name: str, every: int, change: float) -> Policy:
        speed, late = 1 / (1 + moved / step / every), math.inf if change else SPARE_TIMEOUT
        times = every * step, job.timing.commit_seconds
        swaps = {sign: job.swap(sign) for sign in SIGNS}
        return Policy(name, speed, swaps, *times, True, late, value["restart"], change)

    requeue = stalls(value["restart"])
    in_job = stalls(value["start"] + job.rebuild(job.nodes) + job.save + value["sync"])
    alone = job.rebuild(job.replica_nodes) + value["start"] + job.restore
    torchft = stalls(value["torchft_stall"])
    others = stalls(value["others_stall"] + value["others_98k"] * job.gpus / 98_304)
    return [
        Policy("restart, sync", sync / (sync + job.save), requeue, sync + job.save, 0.0),
        Policy("restart, async", saved[0], requeue, *saved[1:]),
        Policy("in-job restart", saved[0], in_job, *saved[1:]),
        Policy("fewer replicas", 1.0, torchft, step, 0.0, offline=alone, rejoin=job.restore),
        Policy("others continue", 1.0, others, step, 0.0, offline=alone),
        hot("hot swap", every, 0.0),
        hot("hot swap, elastic", every, job.change),
        hot("the same, best cadence", cadence, job.change),
    ]


class Timeline(ABC):
    """A run between the failures of a trace: calls that are due later, in order. In a
    subclass, ``_advance`` lets time pass, ``_fail`` has a failure happen, ``_end`` completes the
    outcome."""

    def __init__(self, job: Job, trace: Trace) -> None:
        self.job, self.trace, self.outcome = job, trace, Outcome(trace.seconds)
        self.now = 0.0
        self.timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def play(self) -> Outcome:
        """Run to the end of the trace."""
        for failure in self.trace.failures:
            self._pass(failure.at)
            self._fail(failure)
        self._pass(self.trace.seconds)
        self._end()
        self.outcome.absent /= self.trace.seconds
        return self.outcome

    def _pass(self, until: float) -> None:
        """Make the calls that are due."""
        while self.timers and self.timers[0][0] <= until:
            at, _, act, args = heapq.heappop(self.timers)
            self._advance(at)
            act(*args)
        self._advance(until)

    def _after(self, seconds: float, act: Callable[..., None], *args: object) -> None:
        heapq.heappush(self.timers, (self.now + seconds, next(self._numbers), act, args))

    @abstractmethod
    def _advance(self, now: float) -> None: ...

    @abstractmethod
    def _fail(self, failure: Failure) -> None: ...

    @abstractmethod
    def _end(self) -> None: ...


class _Run(Timeline):
    """The state of a run between failures. ``resume``: when it trains again (in the past: since
    when it trains)."""

    def __init__(self, job: Job, policy: Policy, trace: Trace, luck: random.Random) -> None:
        super().__init__(job, trace)
        self.policy, self.luck = policy, luck
        self.full = self.size = job.sizes[-1]
        # Node with a seat -> its model replica.
        self.seats = {node: node // job.replica_nodes for node in range(job.nodes)}
        self.idle = [*range(job.nodes, trace.nodes)]
        self.back: dict[int, float] = {}  # node in repair -> when it can take a seat
        self.missing: list[int] = []  # replicas of seats without a node
        self.out: dict[int, float] = {}  # replica that is away -> when it is back
        self.exposed: list[float] = []  # losses of nodes whose state is not on two nodes again
        self.resume = self.since = self.safe_at = 0.0
        self.began: float | None = None

    def _advance(self, now: float) -> None:
        spent, self.now = now - self.now, now
        self.outcome.absent += spent * len(self.back)
        self.outcome.waited += spent * (self.resume == math.inf)
        self.outcome.reduced += spent * (self.size < self.full)
        if self.began is not None and now >= self.resume:
            self.outcome.recoveries.append(self.resume - self.began)
            self.began = None

    def _end(self) -> None:
        self._account(self.now)

    def _account(self, now: float, lost: float = 0.0) -> None:
        """Count the training since ``resume`` but the seconds that are lost."""
        if now > self.resume:
            share = self.policy.speed * self.size / self.full
            self.outcome.useful += (now - self.resume - lost) * share
            self.resume = now

    def _lost(self) -> float:
        """Return the seconds of training since the newest complete state."""
        policy, trained = self.policy, max(0.0, self.now - self.resume)
        interval = policy.interval * (self.full / self.size if policy.change else 1.0)
        return trained - max(0.0, (trained - policy.delay) // interval) * interval

    # Failures.

    def _fail(self, failure: Failure) -> None:
        node, ready = failure.node, failure.repaired_at - failure.at + self.job.values["start"]
        is_away = failure.sign == NODE
        if node not in self.seats:
            if is_away:
                self.idle = [each for each in self.idle if each != node]
                self._leave(node, ready)
            return
        replica = self.seats[node]
        if is_away:
            self.missing.append(self.seats.pop(node))
            self._leave(node, ready)
        if replica in self.out:  # the others do not notice
            self._stop_replica(replica)
            return
        lost = self._lost()
        if failure.sign == WRONG:  # seen an iteration later
            lost = max(0.0, min(lost + self.policy.interval, self.now - self.resume))
        if self.now >= self.resume:
            self.began = self.now if self.began is None else self.began
            self.outcome.lost.append(lost)
        self._account(self.now, lost)
        stall = self.policy.stalls[failure.sign] + self._state_loss(is_away)
        if self.policy.offline:
            self._stop_replica(replica)
            self._stall(stall if self.size else math.inf)
        elif self._fill():
            self._stall(stall)
        else:
            if self.resume != math.inf:
                self.resume = self.safe_at = math.inf
                self.since = self.now
            if self.policy.change:
                self._after(2 * self.job.change, self._shrink)

    def _leave(self, node: int, seconds: float) -> None:
        self.back[node] = self.now + seconds
        self._after(seconds, self._return, node)

    def _stall(self, seconds: float) -> None:
        self.resume = self.now + seconds
        self.safe_at = self.resume + self.job.timing.paced_ship_seconds

    def _state_loss(self, is_away: bool) -> float:
        """Return the seconds for a return to a checkpoint, if this loss leaves no copy of some
        state."""
        job = self.job
        if self.now >= self.safe_at:
            self.exposed.clear()
        is_saved = self.resume == math.inf and self.now - self.since > self.policy.late_after
        if not self.policy.is_hot or not is_away or is_saved:
            return 0.0
        # Nodes of a domain that fail together hold no copies of each other.
        others = sum(at < self.now for at in self.exposed)
        self.exposed.append(self.now)
        chance = (job.partners / max(1, job.nodes - 1)) ** job.survived
        ways = math.comb(others, job.survived) if job.survived else 1
        if self.luck.random() >= min(1.0, ways * chance):
            return 0.0
        self.outcome.ends["state lost: back to a checkpoint"] += 1
        self._revert()
        return job.save

    def _revert(self) -> None:
        """Lose the training since the newest checkpoint."""
        share = self.policy.speed
        since = (self.outcome.useful / share) % self.job.values["persist"] + self.job.save
        lost = min(self.outcome.useful, since * share)
        self.outcome.useful -= lost
        self.outcome.lost.append(lost / share)

    # Nodes that are missing, or come back.

    def _fill(self) -> bool:
        """Give spares the missing seats; return whether none is missing any more."""
        while self.missing and self.idle:
            self.seats[self.idle.pop(0)] = self.missing.pop(0)
        return not self.missing

    def _return(self, node: int) -> None:
        """A node is repaired, and warm."""
        if self.back.get(node) != self.now:
            return  # it failed again meanwhile
        del self.back[node]
        self.idle.append(node)
        if self.policy.offline:
            waiting = {*self.missing}
            self._fill()
            for replica in sorted(waiting - {*self.missing}):
                self._stop_replica(replica)
        elif self.missing:
            if self._fill():
                is_late = self.now - self.since > self.policy.late_after
                self.outcome.ends["no node in time: dump, and a new job"] += is_late
                self._stall(self.policy.late if is_late else self.policy.stalls[NODE])
        elif self.size < self.full and self.policy.change:
            self._after(SETTLE, self._grow)

    def _fitting(self) -> int:
        nodes = (len(self.seats) + len(self.idle)) // self.job.replica_nodes
        return max((size for size in self.job.sizes if size <= nodes), default=0)

    def _shrink(self) -> None:
        is_over = self.now - self.since >= 2 * self.job.change - 1e-6
        if self.missing and is_over and (size := self._fitting()):
            self._resize(size)

    def _grow(self) -> None:
        if self.missing or self.now < self.resume:
            self._after(SETTLE, self._grow)
        elif (size := self._fitting()) > self.size:
            self._account(self.now)
            self.began = self.now
            self._resize(size)

    def _resize(self, size: int) -> None:
        nodes, count = [*self.seats, *self.idle], size * self.job.replica_nodes
        self.seats = dict.fromkeys(nodes[:count], 0)
        self.idle, self.missing, self.size = nodes[count:], [], size
        self._stall(self.policy.change)
        if size < self.full:
            self._after(SETTLE + self.policy.change, self._grow)

    # Replicas that fail alone.

    def _stop_replica(self, replica: int) -> None:
        """Take a replica out until it has all its nodes and has started again."""
        self._fill()
        self.out[replica] = self.now + self.policy.offline
        if replica not in self.missing:
            self._after(self.policy.offline, self._rejoin, replica)
        had, self.size = self.size, self.full - len(self.out)
        if had and not self.size:
            self.outcome.ends["no replica left: back to a checkpoint"] += 1
            self._revert()

    def _rejoin(self, replica: int) -> None:
        if self.out.get(replica) != self.now or replica in self.missing:
            return
        self._account(self.now)
        del self.out[replica]
        self.size = self.full - len(self.out)
        first = self.now if self.resume == math.inf else self.resume
        self.resume = max(first, self.now + self.policy.rejoin)


def simulate(job: Job, policy: Policy, trace: Trace, seed: str) -> Outcome:
    """Run a job on a trace. ``seed`` determines the facts that the trace leaves open, such as
    whether two nodes held copies of each other."""
    return _Run(job, policy, trace, random.Random(f"{seed} luck")).play()
