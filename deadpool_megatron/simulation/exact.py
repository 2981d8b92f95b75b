"""A run by the coordinator's own state machine and planner, with all agents in bulk.

Between failures no iteration is an event: the contents of the nodes' memory follow from the time.
At a failure each inventory, record, restore and wait is an input of the machine, after its seconds.
"""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.machine import actions as act, inputs as ev, state as states
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.layout import records as rec
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.ranks import SIZE_STEP, first_role
from deadpool_megatron.layout.shard_map import ShardMap
from deadpool_megatron.layout.sizes import Sizes
from deadpool_megatron.planning import shards
from deadpool_megatron.settings import Settings
from deadpool_megatron.simulation import run
from deadpool_megatron.simulation.hazards import HANG, NODE, PROCESS, Failure, Trace
from deadpool_megatron.simulation.job import SPARE_TIMEOUT, Job

# Between ticks; from an order to the first message of a forked process, and to its end.
_TICK_SECONDS, _FORK_SECONDS, _KILL_SECONDS = 0.1, 0.3, 0.5


def simulate(job: Job, policy: run.Policy, trace: Trace, seed: str) -> run.Outcome:
    """Run a hot swap on a trace; other ways as :func:`.run.simulate` does. ``seed`` determines the
    processes that fail on a node."""
    if not policy.is_hot:
        return run.simulate(job, policy, trace, seed)
    gc.disable()  # it would look at all agents again and again
    try:
        return _Run(job, policy, trace, seed).play()
    finally:
        gc.enable()


def seconds_of(job: Job, trace: Trace) -> float:
    """Return an estimate of the processor seconds of all three hot swaps on a trace."""
    return 3 * (len(trace.failures) * 1e-3 * job.nodes + 1.5e-5 * job.nodes**2)


class _Run(run.Timeline):
    """Jobs, one after the other, each with a machine. ``up``: the hosts in service; ``saved``: the
    iteration of the newest checkpoint."""

    def __init__(self, job: Job, policy: run.Policy, trace: Trace, seed: str) -> None:
        super().__init__(job, trace)
        self.policy, self.draw, grid = policy, random.Random(seed), job.plan.parallel.grid
        self.every = round(policy.interval / job.timing.step_seconds)
        sizes = job.sizes if policy.change else job.sizes[-1:]
        self.sizes = Sizes(grid.ranks, tuple(sizes), grid=grid)
        self.layouts: dict[int, rec.RoleLayout] = {}
        self.settings = Settings(
            copies=job.survived,
            cadence=str(self.every),
            elastic="auto" if policy.change else "off",
            elastic_wait=f"{min(2 * job.change, SPARE_TIMEOUT):.3f}",
            spare_timeout_seconds=SPARE_TIMEOUT,
            persist_directory="/exports",
            rebuild_seconds=max(180.0, 4 * job.rebuild(job.nodes)),
            nonfinite="rollback",
            restarts_in_place=100_000,
        )
        self.saved, self.up = 0, {*range(trace.nodes)}
        self._begin(states.INITIAL)

    def _begin(self, start: rec.Restore) -> None:
        """Start a job on the hosts in service, as soon as there are enough."""
        nodes, nproc = self.job.nodes, self.job.plan.cluster.gpus_per_node
        if len(self.up) < nodes:
            self._after(60.0, self._begin, start)
            return
        config = states.Config(nodes, len(self.up) - nodes, nproc, self.settings, "/dump", start)
        self.machine = Machine(config, self.now)
        self.record: Any = None  # the newest that was announced
        self.node_of: dict[int, int] = {}  # host -> number of its node
        self.held: dict[int, dict[int, tuple[rec.Generation, ...]]] = {}  # node -> role -> sealed
        self.live: dict[rec.Seat, bool] = {}  # process -> whether it has built
        self.first, self.stopped, self.began = start.generation.iteration, self.now, self.now
        self.opened = self.safe_at = math.inf
        self.is_first, self.is_over, self.is_small = self.now == 0.0, False, False
        self.joined, self.ticked_at = -1, self.now
        for host in sorted(self.up):
            self._join(host)

    def _join(self, host: int) -> None:
        node = self.joined = self.joined + 1
        self.node_of[host], self.held[node] = node, {}
        self._feed(ev.NodeJoined(node, f"host{host}-{node}", 1, str(self.job.domains[host])))

    # Time.

    def _pass(self, until: float) -> None:
        """Make the calls that are due, and a tick at each deadline of the machine."""
        while True:
            state, due = self.machine.state, self.timers[0][0] if self.timers else math.inf
            times = state.phase_state.deadline, getattr(state.blame.suspicion, "until", None)
            tick = min((each for each in times if each is not None), default=math.inf)
            tick = max(tick, self.ticked_at + _TICK_SECONDS)
            if min(due, tick) > until:
                return super()._pass(until)
            if due <= tick:
                super()._pass(due)
            else:
                self.ticked_at = tick
                self._advance(tick)
                self._feed(ev.Tick())

    def _advance(self, now: float) -> None:
        spent, self.now, out = now - self.now, now, self.outcome
        waits = self.is_over or self.machine.state.phase is states.Phase.WAITING_SPARE
        out.absent += spent * (self.trace.nodes - len(self.up))
        out.waited += spent * waits
        out.reduced += spent * self.is_small

    def _after(self, seconds: float, act: Callable[..., None], *args: object) -> None:
        super()._after(seconds * (not self.is_first), act, *args)  # the first start costs no time

    def _end(self) -> None:
        self.outcome.useful = self._reached() * self.job.timing.step_seconds

    # The machine.

    def _feed(self, *events: ev.Input) -> None:
        for event in events:
            for action in [] if self.is_over else self.machine.handle(event, self.now):
                self._carry_out(action)

    def _carry_out(self, action: act.Action) -> None:
        job, value = self.job, self.job.values
        match action:
            case act.WriteRecord(record):
                self._after(job.decide, self._feed, ev.JournalWritten(record.epoch))
            case act.Announce(record):
                self._announce(record)
            case act.CloseEpoch(epoch):
                self._after(value["close"], self._report_memory, epoch)
            case act.InspectCheckpoints():
                self._after(0.0, self._feed, ev.CheckpointsFound(frozenset()))
            case act.StartMembers(node, incarnations):
                places = [rec.Seat(node, *each) for each in incarnations.items()]
                self.live |= dict.fromkeys(places, False)
                self._after(_FORK_SECONDS, self._report, ev.MemberHello, places)
                self._after(value["start"], self._warm_up, places)
            case act.KillMember(node, rank, incarnation):
                if self.live.pop(rec.Seat(node, rank, incarnation), None) is not None:
                    lost = ev.MemberLost(node, rank, incarnation, signal=9, ordered=True)
                    self._after(_KILL_SECONDS, self._feed, lost)
            case act.Pause(epoch, iteration):
                left = max(0.0, (iteration - self.first) * self._step - (self.now - self.opened))
                self._after(left + job.timing.commit_seconds, self._pause, epoch, iteration)
            case act.Dump(nodes, _, generation):
                self._after(job.save, self._feed, *(ev.Dumped(n, generation) for n in nodes))
            case act.ExportDump(restore):
                exported = ev.DumpExported(restore.generation, "/exports/dump")
                self._after(job.save, self._feed, exported)
            case act.Finish(_, reason, resume):
                self.is_over = True
                self.outcome.ends[reason.partition(";")[0][:70]] += 1
                # Only repairs outlive a job.
                self.timers = sorted(each for each in self.timers if each[2] == self._return)
                last = rec.Restore("durable", rec.Generation(0, self.saved), path="/")
                self._after(value["restart"], self._begin, resume or last)

    # Agents and members.

    def _layout(self, role: int) -> rec.RoleLayout:
        if role not in self.layouts:
            first, plan = first_role(role), self.job.plan
            parallel = replace(plan.parallel, dp=self.sizes.replicas[-1] - first // SIZE_STEP)
            can_cut = ShardMap(nbytes=int(len(self.sizes.replicas) > 1))
            for rank, found in shards.topology_of(replace(plan, parallel=parallel)).layouts.items():
                here, peers = first + rank, _moved(found.peers, first)
                parts = tuple(replace(p, replicas=_moved(p.replicas, first)) for p in found.parts)
                facts = here, parts, peers, found.slots, str(here), "", can_cut
                self.layouts[here] = rec.RoleLayout(*facts)
        return self.layouts[role]

    def _report(self, kind: type[ev.OfMember], places: list[rec.Seat]) -> None:
        """Have the processes report that are still alive."""
        self._feed(*(kind(*_place(place)) for place in places if place in self.live))

    def _warm_up(self, places: list[rec.Seat]) -> None:
        """Processes have built. Without a seat they are warm once an epoch is open."""
        self.live |= dict.fromkeys(self.live.keys() & places, True)
        if self.record is not None and self.machine.state.epoch == self.record.epoch:
            self._report(ev.MemberWarm, places)

    def _announce(self, record: rec.EpochRecord) -> None:
        before, newest = self.record, record.restore.generation
        is_kept = record.restore.kind == "memory"
        if self.opened < math.inf:
            trained = max(0.0, self.stopped - self.opened) / self._step
            self.outcome.lost.append(max(0.0, self.first + trained - newest.iteration) * self._step)
            if not is_kept:
                self.outcome.ends["state lost: back to a checkpoint"] += 1
        self.record, self.first, self.is_small = record, newest.iteration, min(record.seats) > 0
        self.opened = self.safe_at = math.inf
        for sealed in self.held.values():
            for role, kept in sealed.items():
                sealed[role] = tuple(each for each in kept if is_kept and each <= newest)
        copies = CopyPlacement.of_record(record)
        self.buddies = {r: copies.buddies(r, self._layout(r).peers) for r in record.seats}
        seats = {*record.seats.values()}
        self._report(ev.MemberWarm, [p for p, warm in self.live.items() if warm and p not in seats])
        is_change = before is not None and before.seats.keys() != record.seats.keys()
        is_moved = before is None or {*before.seats.values()} != seats
        build = self.job.values["build" if all(self.live.get(seat) for seat in seats) else "start"]
        self.live |= dict.fromkeys(self.live.keys() & seats, True)
        seconds = build * (is_moved or is_change) + self.job.restore * is_change
        self._after(self.job.opening + seconds, self._restored, record)

    def _restored(self, record: rec.EpochRecord) -> None:
        """All members report, unless some of them are lost."""
        state, generation, epoch = self.machine.state, record.restore.generation, record.epoch
        if not self.live.keys() >= {*record.seats.values()} or epoch != state.reporting_epoch:
            return
        for role, seat in record.seats.items():
            registered = ev.MemberRegistered(*_place(seat), self._layout(role), self.sizes)
            self._feed(registered, ev.Restored(*_place(seat), epoch, generation))
            self.held[seat.node][role] = (generation,)
        if state.phase in (states.Phase.RUNNING, states.Phase.PAUSING):
            self.opened, self.is_first = self.now, False
            self.safe_at = self.now + self.job.timing.paced_ship_seconds
            if self.began < self.now:
                self.outcome.recoveries.append(self.now - self.began)
            self.stopped = self.began = math.inf

    @property
    def _step(self) -> float:
        slower = self.job.sizes[-1] * self.sizes.ranks_per_replica / len(self.record.seats)
        return self.job.timing.step_seconds / self.policy.speed * slower

    def _reached(self) -> int:
        """Return the newest iteration that all have completed."""
        trained = min(self.now, self.stopped) - self.opened
        return self.first + (int(trained / self._step + 1e-9) if trained > 0 else 0)

    def _stop(self) -> None:
        """All roles stand still; note the generations that the nodes hold."""
        if self.record is None or self.opened > self.now or self.stopped <= self.now:
            return
        reached, record = self._reached(), self.record
        self.stopped = self.began = self.now
        into_step = self.now - self.opened - (reached - self.first) * self._step
        is_late = into_step < self.job.timing.commit_seconds - 1e-6
        own, copied = self._generations(reached), self._generations(reached - is_late)
        if is_safe := self.now >= self.safe_at:  # vaults give back the rest
            self.held = {node: {} for node in self.held}
        for role, seat in record.seats.items():
            self.held[seat.node][role] = own
            for node in self.held.keys() & self.buddies[role] if is_safe else ():
                self.held[node][role] = copied
        if reached > self.first:
            self._feed(ev.StepReported(record.epoch, reached))
        every = max(1, int(self.job.values["persist"] / self._step))
        saved = int(max(0.0, reached - self.job.save / self._step)) // every * every
        if saved > self.saved:
            self.saved = saved
            self._feed(ev.DurableValid(saved, f"/exports/{saved}"))

    def _generations(self, newest: int) -> tuple[rec.Generation, ...]:
        """Return the two newest protected generations of the open epoch."""
        newest = max(self.first, newest // self.every * self.every)
        numbers = sorted({max(self.first, newest - self.every), newest})
        start, epoch = self.record.restore.generation, self.record.epoch
        return tuple(start if n == self.first else rec.Generation(epoch, n) for n in numbers)

    def _report_memory(self, epoch: int) -> None:
        for node in sorted(self.node_of.values()):
            holdings, known = [], []
            for role, kept in self.held[node].items():
                known.append(layout := self._layout(role))
                parts = frozenset({*layout.shard_parts, rec.extras_part("step")})
                holdings += [rec.Holding(role, generation, parts) for generation in kept]
            self._feed(ev.NodeInventory(rec.Inventory(node, epoch, tuple(holdings), tuple(known))))

    def _pause(self, epoch: int, iteration: int) -> None:
        if self.record.epoch == epoch == self.machine.state.epoch and self.stopped > self.now:
            self._stop()
            places = map(_place, self.record.seats.values())
            self._feed(*(ev.Paused(*place, epoch, iteration) for place in places))

    # Failures.

    def _fail(self, failure: Failure) -> None:
        host, sign = failure.node, failure.sign
        if host not in self.up:
            return
        if sign == NODE:
            self.up.remove(host)
            super()._after(failure.repaired_at - self.now, self._return, host)
        if self.is_over or host not in self.node_of or self.record is None:
            return
        node, after = self.node_of[host], self.job.detect(sign)
        rank = self.draw.randrange(self.job.plan.cluster.gpus_per_node)
        roles = {seat: role for role, seat in self.record.seats.items()}
        if any(seat.node == node for seat in roles):
            self._stop()
        if sign == NODE:
            del self.node_of[host], self.held[node]
            self.live = {each: warm for each, warm in self.live.items() if each.node != node}
            self._after(after, self._feed, ev.NodeLost(node, "it is silent"))
        for seat in [each for each in self.live if (each.node, each.local_rank) == (node, rank)]:
            if sign == PROCESS:
                del self.live[seat]
                self._after(after, self._feed, ev.MemberLost(*_place(seat), signal=11))
            elif sign == HANG:
                self._after(after, self._feed, ev.MemberSuspected(*_place(seat), "no progress"))
            elif seat in roles:
                at = self.record.epoch, node, roles[seat], self._reached() + 1
                self._after(after, self._feed, ev.NotFinite(*at, "loss", "nan"))

    def _return(self, host: int) -> None:
        self.up.add(host)
        if not self.is_over:
            self._join(host)


def _moved(roles: tuple[int, ...], first: int) -> tuple[int, ...]:
    return tuple(first + each for each in roles)


def _place(seat: rec.Seat) -> tuple[int, int, int]:
    return seat.node, seat.local_rank, seat.incarnation
