"""A run by the coordinator's own state machine and planner, with all agents in bulk.

Between failures no iteration is an event: the memory of nodes follows from the time. At a failure
each inventory, record, restore and wait is an input of the machine, after its seconds.

    python -m tests.simulated.exact configs/65b.yaml --seeds 100 --out exact.jsonl

runs hot swaps of `deadpool simulate` in this way, on its traces, and its fast model, too. It first
prints how long that takes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import heapq
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.machine import actions as act, inputs as ev, state as states
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.layout import records as rec
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.ranks import SIZE_STEP, first_role
from deadpool_megatron.layout.shard_map import ShardMap
from deadpool_megatron.layout.sizes import Sizes
from deadpool_megatron.planning import shards
from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.model_replicas import Workload
from deadpool_megatron.planning.sections import Plan, read_plan
from deadpool_megatron.settings import Settings
from deadpool_megatron.simulation.hazards import HANG, NODE, PROCESS, Failure, Trace
from deadpool_megatron.simulation.job import SPARE_TIMEOUT, Job
from deadpool_megatron.simulation.run import Outcome, policies, simulate
from tests.simulated.world import next_deadline

_TICK_SECONDS = 0.1
# Time, order, the machine that the call is for (None: any), call.
_Due = tuple[float, int, Machine | None, Callable[[], object]]
Place = tuple[int, int, int]  # node, local rank, incarnation
_FORK_SECONDS = 0.3  # from an order to the first message of a forked process


class Exact:
    """A run of a plan on a trace. ``elastic``: it may continue with fewer model replicas."""

    def __init__(self, plan: Plan, job: Job, trace: Trace, seed: str, *, elastic: bool) -> None:
        self.plan, self.job, self.trace, self.draw = plan, job, trace, random.Random(seed)
        grid = plan.parallel.grid
        self.sizes = Sizes(grid.ranks, tuple(job.sizes if elastic else job.sizes[-1:]), grid=grid)
        self.layouts, self.parts = dict[int, rec.RoleLayout](), dict[int, frozenset[str]]()
        self.settings = Settings(
            copies=job.survived,
            elastic="auto" if elastic else "off",
            elastic_wait=f"{min(2 * job.change, SPARE_TIMEOUT):.3f}",
            spare_timeout_seconds=SPARE_TIMEOUT,
            persist_directory="/exports",
            communicator="nccl",
            rebuild_seconds=max(180.0, 4 * job.rebuild(job.nodes)),
            nonfinite="rollback",
            restarts_in_place=100_000,
        )
        self.outcome = Outcome(trace.seconds)
        self.due: list[_Due] = []
        self.numbers = itertools.count()
        self.is_first, self.is_over, self.is_changed = True, False, True
        self.ticked_at = self.deadline = 0.0
        self.now, self.saved, self.up = 0.0, 0, {*range(trace.nodes)}
        self._begin(states.INITIAL)

    def play(self) -> Outcome:
        """Run to the end of the trace."""
        for failure in self.trace.failures:
            self._pass(failure.at)
            self._fail(failure)
        self._pass(self.trace.seconds)
        self.outcome.useful = self._reached() * self.job.timing.step_seconds
        self.outcome.absent /= self.trace.seconds
        return self.outcome

    # Time.

    def _after(self, seconds: float, call: Callable[..., object], *args: object) -> None:
        """Call later, unless this job is over by then; repairs and new jobs come in any case."""
        of_job = None if call in (self._return, self._restart) else self.machine
        at, bound = self.now + seconds * (not self.is_first), functools.partial(call, *args)
        due: _Due = (at, next(self.numbers), of_job, bound)
        heapq.heappush(self.due, due)

    def _pass(self, until: float) -> None:
        while True:
            if self.is_changed:
                self.deadline = next_deadline(self.machine.state, self.config)
                self.is_changed = False
            deadline = self.deadline
            deadline = math.inf if self.is_over else max(deadline, self.ticked_at + _TICK_SECONDS)
            due = self.due[0][0] if self.due else math.inf
            now = min(due, deadline, until)
            spent, self.now, out = now - self.now, now, self.outcome
            out.absent += spent * (self.trace.nodes - len(self.up))
            out.waited += spent * (self.machine.state.phase is Phase.WAITING_SPARE or self.is_over)
            out.reduced += spent * self.is_small
            if due <= now:
                _, _, machine, call = heapq.heappop(self.due)
                if machine is None or (machine is self.machine and not self.is_over):
                    call()
            elif deadline <= now:
                self.ticked_at = now
                self._feed(ev.Tick())
            else:
                return

    # Jobs.

    def _begin(self, start: rec.Restore) -> None:
        """Start a job on the machines in service; the first costs no time."""
        nodes, nproc = self.job.nodes, self.plan.cluster.gpus_per_node
        spares = max(0, len(self.up) - nodes)
        self.config = states.Config(nodes, spares, nproc, self.settings, "/dump", start)
        self.machine = Machine(self.config, self.now)
        self.record: Any = None  # the newest that was announced
        self.is_small = False
        self.node_of: dict[int, int] = {}  # machine -> node number of its agent
        self.held: dict[int, dict[int, tuple[rec.Generation, ...]]] = {}  # node -> role -> sealed
        self.running: dict[tuple[int, int], int] = {}  # place -> incarnation of its process
        self.first, self.stopped, self.began = start.generation.iteration, self.now, self.now
        self.opened = self.safe_at = math.inf
        self.known, self.built = set[int](), set[tuple[int, int, int]]()
        self.ticked_at, self.is_changed, self.deadline = self.now, True, math.inf
        self.is_first, self.is_over, self.joined = self.now == 0.0, False, -1
        for machine in sorted(self.up):
            self._join(machine)

    def _join(self, machine: int) -> None:
        number = self.joined = self.joined + 1
        self.node_of[machine], self.held[number] = number, {}
        host = f"host{machine}-{number}"
        self._feed(ev.NodeJoined(number, host, 1, str(self.job.domains[machine])))

    def _feed(self, event: ev.Input) -> None:
        self.is_changed = True
        for action in [] if self.is_over else self.machine.handle(event, self.now):
            self._carry_out(action)

    def _layout(self, role: int) -> rec.RoleLayout:
        if role not in self.layouts:
            first = first_role(role)
            parallel = replace(self.plan.parallel, dp=self.sizes.replicas[-1] - first // SIZE_STEP)
            found = shards.topology_of(replace(self.plan, parallel=parallel)).layouts
            for rank, layout in found.items():
                parts = {*layout.shard_parts, rec.extras_part("step")}
                self.parts[first + rank] = frozenset(parts)
                self.layouts[first + rank] = replace(
                    layout,
                    role=first + rank,
                    parts=tuple(
                        replace(each, replicas=tuple(first + r for r in each.replicas))
                        for each in layout.parts
                    ),
                    peers=tuple(first + peer for peer in layout.peers),
                    layout_hash=str(first + rank),
                    shard_map=ShardMap(nbytes=int(len(self.sizes.replicas) > 1)),
                )
        return self.layouts[role]

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
                self.running |= {(node, rank): number for rank, number in incarnations.items()}
                places = [(node, *each) for each in incarnations.items()]
                self._after(_FORK_SECONDS, self._report, ev.MemberHello, places)
                self._after(value["start"], self._warm_up, places)
            case act.KillMember(node, rank, incarnation):
                if self.running.get((node, rank)) == incarnation:
                    del self.running[node, rank]
                    lost = ev.MemberLost(node, rank, incarnation, signal=9, ordered=True)
                    self._after(0.5, self._feed, lost)
            case act.Pause(epoch, iteration):
                passed = (iteration - self.first) * self._step - (self.now - self.opened)
                self._after(
                    max(0.0, passed) + job.timing.commit_seconds, self._pause, epoch, iteration
                )
            case act.Dump(nodes, _, generation):
                for node in nodes:
                    self._after(job.save, self._feed, ev.Dumped(node, generation))
            case act.ExportDump(restore):
                exported = ev.DumpExported(restore.generation, "/exports/dump")
                self._after(job.save, self._feed, exported)
            case act.Finish():
                self.is_over = True
                self.outcome.ends[action.reason.partition(";")[0][:70]] += 1
                resume = action.resume or rec.Restore(
                    "durable", rec.Generation(0, self.saved), path="/"
                )
                self._after(value["restart"], self._restart, resume)

    def _restart(self, resume: rec.Restore) -> None:
        """Start the next job as soon as there are enough machines."""
        if len(self.up) < self.job.nodes:
            self._after(60.0, self._restart, resume)
        else:
            self._begin(resume)

    # Agents and members.

    def _report(self, kind: type[ev.OfMember], places: Iterable[Place]) -> None:
        """Have the processes report that are still alive."""
        for place in places:
            if self.running.get(place[:2]) == place[2]:
                self._feed(kind(*place))

    def _warm_up(self, places: list[Place]) -> None:
        """Processes have built. Without a seat they are warm once an epoch is open."""
        self.built.update(places)
        if self.record is not None and self.machine.state.epoch == self.record.epoch:
            self._report(ev.MemberWarm, places)

    def _announce(self, record: rec.EpochRecord) -> None:
        before, restore, self.is_small = self.record, record.restore, min(record.seats) > 0
        if self.opened < math.inf:
            trained = max(0.0, self.stopped - self.opened) / self._step
            lost = self.first + trained - restore.generation.iteration
            self.outcome.lost.append(max(0.0, lost) * self._step)
            if restore.kind != "memory":
                self.outcome.ends["state lost: back to a checkpoint"] += 1
        self.record, self.first = record, restore.generation.iteration
        self.opened = self.safe_at = math.inf
        for sealed in self.held.values():
            for role, kept in sealed.items():
                newest = restore.generation
                sealed[role] = tuple(g for g in kept if restore.kind == "memory" and g <= newest)
        copies = CopyPlacement.of_record(record)
        self.buddies = {
            role: copies.buddies(role, self._layout(role).peers) for role in record.seats
        }
        seats = {*map(_place, record.seats.values())}
        self._report(ev.MemberWarm, sorted(self.built - seats))
        is_change = before is not None and before.seats.keys() != record.seats.keys()
        moved = before is None or set(before.seats.values()) != set(record.seats.values())
        build = "build" if seats <= self.built else "start"
        self.built |= seats
        seconds = self.job.opening + self.job.values[build] * (moved or is_change)
        self._after(seconds + self.job.restore * is_change, self._restored, record)

    def _restored(self, record: rec.EpochRecord) -> None:
        """All members report, unless some of them are lost."""
        live = all(self.running.get(s[:2]) == s[2] for s in map(_place, record.seats.values()))
        if not live or record.epoch != self.machine.state.reporting_epoch:
            return
        generation = record.restore.generation
        for role, seat in record.seats.items():
            place = _place(seat)
            if role not in self.known:
                self._feed(ev.MemberRegistered(*place, self._layout(role), self.sizes))
            self._feed(ev.Restored(*place, record.epoch, generation))
            self.held[seat.node][role] = (generation,)
        self.known |= record.seats.keys()
        if self.machine.state.phase in (Phase.RUNNING, Phase.PAUSING):
            self.opened, self.is_first = self.now, False
            self.safe_at = self.now + self.job.timing.paced_ship_seconds
            if self.began < self.now:
                self.outcome.recoveries.append(self.now - self.began)
            self.stopped = self.began = math.inf

    @property
    def _step(self) -> float:
        slower = self.job.sizes[-1] * self.sizes.ranks_per_replica / len(self.record.seats)
        return self.job.timing.step_seconds * (1 + self.job.values["overhead"]) * slower

    def _reached(self) -> int:
        """Return the newest iteration that all have completed."""
        trained = min(self.now, self.stopped) - self.opened
        return self.first + max(0, int(trained / self._step + 1e-9)) if trained > 0 else self.first

    def _stop(self, *, at_boundary: bool = False) -> None:
        """All roles stand still; note the generations that the nodes hold."""
        if self.record is None or self.opened > self.now or self.stopped <= self.now:
            return
        reached, record = self._reached(), self.record
        self.stopped = self.began = self.now
        into_step = self.now - self.opened - (reached - self.first) * self._step
        is_late = into_step < self.job.timing.commit_seconds and not at_boundary
        committed = max(self.first, reached - is_late)
        own, copied = self._generations(reached), self._generations(committed)
        is_safe = self.now >= self.safe_at
        if is_safe:  # vaults give back the rest
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
        """Return the two newest generations of the open epoch."""
        record, numbers = self.record, range(max(self.first, newest - 1), newest + 1)
        start = record.restore.generation
        return tuple(start if n == self.first else rec.Generation(record.epoch, n) for n in numbers)

    def _report_memory(self, epoch: int) -> None:
        for node in sorted(self.node_of.values()):
            holdings, layouts = [], []
            for role, kept in self.held[node].items():
                layout = self._layout(role)
                holdings += [rec.Holding(role, each, self.parts[role]) for each in kept]
                layouts.append(layout)
            self._feed(
                ev.NodeInventory(rec.Inventory(node, epoch, tuple(holdings), tuple(layouts)))
            )

    def _pause(self, epoch: int, iteration: int) -> None:
        if self.record.epoch == epoch == self.machine.state.epoch and self.stopped > self.now:
            self._stop(at_boundary=True)
            for seat in self.record.seats.values():
                self._feed(ev.Paused(*_place(seat), epoch, iteration))

    # Failures.

    def _fail(self, failure: Failure) -> None:
        machine, sign = failure.node, failure.sign
        if machine not in self.up:
            return
        if sign == NODE:
            self.up.remove(machine)
            self._after(failure.repaired_at - self.now, self._return, machine)
        if self.is_over or machine not in self.node_of:
            return
        node, seconds = self.node_of[machine], self.job.detect(sign)
        rank = self.draw.randrange(self.plan.cluster.gpus_per_node)
        process = node, rank, self.running.get((node, rank), -1)
        seats = {_place(seat): role for role, seat in self.record.seats.items()}
        if any(place[0] == node for place in seats):
            self._stop()
        if sign == NODE:
            del self.node_of[machine], self.held[node]
            self.running = {place: n for place, n in self.running.items() if place[0] != node}
            self._after(seconds, self._feed, ev.NodeLost(node, "it is silent"))
        elif sign == HANG:
            self._after(seconds, self._feed, ev.MemberSuspected(*process, "no progress"))
        elif sign == PROCESS and self.running.pop((node, rank), None) is not None:
            self._after(seconds, self._feed, ev.MemberLost(*process, signal=11))
        elif process in seats:
            bad, epoch = self._reached() + 1, self.record.epoch
            loss = ev.NotFinite(epoch, node, seats[process], bad, "loss", "nan")
            self._after(seconds, self._feed, loss)

    def _return(self, machine: int) -> None:
        self.up.add(machine)
        if not self.is_over:
            self._join(machine)


def _place(seat: rec.Seat) -> Place:
    return seat.node, seat.local_rank, seat.incarnation


def beside(plan: Plan, seeds: Iterable[int], days: float = 30.0) -> Iterator[dict[str, Any]]:
    """Run both ways; yields a row for each seed and policy."""
    full, nproc = plan.parallel.dp, plan.cluster.gpus_per_node
    sizes = Workload(plan.parallel.grid).possible(full, nproc)
    job = Job.of(assess(plan), sizes, {})
    ways = {policy.name: policy for policy in policies(job, 1e-6)}
    for number in seeds:
        trace = job.hazards(0.0).trace(f"0 {number}", job.machines, days)
        for name in ("hot swap", "hot swap, elastic"):
            began = time.process_time()
            exact = Exact(plan, job, trace, str(number), elastic=name != "hot swap").play()
            row: dict[str, Any] = {"seed": number, "policy": name, "failures": len(trace.failures)}
            row["cpu_seconds"] = round(time.process_time() - began, 2)
            fast = simulate(job, ways[name], trace, str(number))
            for model, run in (("exact", exact), ("fast", fast)):
                row[model] = {
                    "ettr": round(run.ettr, 6),
                    "interruptions": len(run.recoveries),
                    "waited": round(run.waited),
                    "reduced": round(run.reduced),
                    "lost": round(sum(run.lost), 1),
                    "ends": dict(run.ends),
                }
            yield row
            gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--out", type=Path, required=True, help="rows are added to it")
    args = parser.parse_args()
    gc.disable()  # it would look at all agents again and again
    plan = read_plan(args.file, args.set)
    nodes = plan.cluster.nodes
    failures = 24 / plan.cluster.failure_hours * args.days * nodes
    seconds = 2 * args.seeds * (failures * 1e-3 * nodes + 1.5e-5 * nodes**2)
    print(f"about {seconds / 60:.1f} minutes of one processor", flush=True)
    for row in beside(plan, range(args.first, args.first + args.seeds), args.days):
        done = row["seed"] + 1 - args.first
        print(f"\r[{'#' * (40 * done // args.seeds):40}] {done}", end="", flush=True)
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
