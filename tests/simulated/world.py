"""A simulated cluster around the real machine, in simulated time; it holds the rules of the design.

Messages take time; on a connection they keep their order, and nothing else is ordered. Time jumps
from one call that is due, or deadline of the machine, to the next.
"""

import json
import math
from collections import Counter
from collections.abc import Container, Iterable
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple

from deadpool_megatron.cluster.machine import actions as act, inputs as ev, state as states
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state import MemberStatus, Phase
from deadpool_megatron.events import Kind, to_line
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.planner import keep_lineages
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore
from deadpool_megatron.settings import Settings
from tests.common.event_schema import check_event
from tests.simulated.agents import REFUSAL, Agents, Node
from tests.simulated.clock import Channel, Clock

STEP_SECONDS = 0.5
TICK_SECONDS = 0.1
MAX_CALLS = 100_000  # until a world has to be at rest


class Shape(NamedTuple):
    """A run. ``parity_group``: 0 for copies at buddies. ``is_elastic``: with fewer nodes, too."""

    nodes: int = 2
    spares: int = 1
    nproc: int = 1
    replicas: int = 1
    parity_group: int = 0
    is_elastic: bool = False

    def config(self) -> states.Config:
        scheme: dict[str, Any] = {"persist_directory": "/exports", "nonfinite": "rollback"}
        if self.parity_group:
            scheme |= {"protection": "parity", "parity_group": self.parity_group}
        if not self.is_elastic:
            scheme |= {"elastic": "off"}
        else:
            scheme |= {"elastic_wait": "60", "settle_seconds": 50.0}
        settings = Settings(copies=self.replicas, restarts_in_place=10_000, **scheme)
        return states.Config(self.nodes, self.spares, self.nproc, settings, "/dump")


def next_deadline(state: states.State, config: states.Config) -> float:
    """Return the earliest time at which a tick can change anything."""
    settings, doing, fleet = config.settings, state.phase_state, state.fleet
    times = [doing.deadline] if doing.deadline is not None else []
    if isinstance(doing, states.Bootstrapping):
        times.append(doing.deadline - settings.start_seconds + settings.connect_seconds)
    if isinstance(doing, states.TakingOver) and config.restarted:
        began = doing.deadline - settings.start_seconds
        times += [began + settings.connect_seconds, began + settings.rejoin_seconds]
    if state.blame.suspicion is not None:
        times.append(state.blame.suspicion.until)
    limits = dict.fromkeys(MemberStatus, settings.start_seconds)
    limits |= {MemberStatus.KILLED: settings.close_seconds, MemberStatus.WARM: math.inf}
    times += [
        member.since + limits[member.status] + 1e-6
        for place, member in fleet.members.items()
        if member.status is MemberStatus.KILLED or place not in state.seats.role_by_place
    ]
    return min(times, default=math.inf) if state.phase is not Phase.ENDED else math.inf


def knowledge(state: states.State) -> dict[str, object]:
    """Return what a successor knows of the run at once, from its newest record."""
    line, blame, fleet = state.lineage, state.blame, state.fleet
    return {
        # A note of a change of size adds to the history of the record in the journal.
        "epoch": (state.record and replace(state.record, history=History()), state.epoch),
        "size": (state.changes.trained, state.changes.failed),
        "line": (line.kept, line.invalidated),
        "blame": (blame.failures, blame.nonfinite),
        "nodes": (fleet.removed.keys(), fleet.quarantined, fleet.quarantined_hosts),
        "protection": state.protection.plan,
    }


class World(Agents):
    """Everything outside the machine, and the machine. ``check_every``: inputs after which costly
    checks are made, each at its own time."""

    inspects = True  # finds all checkpoints

    def __init__(self, config: states.Config, clock: Clock, check_every: int = 3) -> None:
        super().__init__(config, clock)
        self.check_every, self.fed = check_every, 0
        self.machine = Machine(self.config, clock.now)
        self.next_node = 0
        self.journal = Channel[EpochRecord](clock, self._note_journal, "journal")
        self.journaled: list[EpochRecord] = []
        self.written: list[int] = []
        self.noted: dict[int, str] = {}  # nodes given up since the newest record
        self.closed: list[int] = []
        self.finished: act.Finish | None = None
        self.exporting: Generation | None = None
        self.poisoned_from: int | None = None  # by a loss that the machine has received
        self.lost: list[Node] = []  # whose last reports are still on their way
        self.saved: list[Restore] = []  # checkpoints, newest first
        self.failures: dict[int, Counter[int]] = {0: Counter()}  # epoch -> size -> failed changes
        self.waits_since: float | None = None
        self.poor: frozenset[int] = frozenset()  # at the newest decision
        self.told_size = self.sizes.replicas[-1]  # by the newest event
        self.rested_at = self.ticked_at = self.changed_at = clock.now
        for _ in range(config.nodes + config.spares):
            self.join()

    @property
    def state(self) -> states.State:
        return self.machine.state

    # The machine and its actions.

    def feed(self, event: ev.Input) -> list[act.Action]:
        state, before = self.state, self.state.epoch
        self._note_loss(event)
        if isinstance(event, ev.DurableValid):
            save = Restore("durable", Generation(0, event.iteration), path=event.path)
            self.saved = [save, *(s for s in self.saved if s.path != event.path)]
        actions = self.machine.handle(event, self.clock.now)
        if isinstance(event, ev.AgentEnded):
            assert not {event.node} & self.nodes.keys() & self.state.fleet.removed.keys()
        self.fed += 1
        if self.fed % self.check_every == 0 and not isinstance(event, ev.NodeJoined):
            self._repeat(event)
        is_calm = state.phase in (Phase.RUNNING, Phase.ENDED)
        assert is_calm if state.phase_state.deadline is None else state.phase is not Phase.ENDED
        self._check_wait()
        assert state.epoch >= before
        for node in set(self.state.fleet.removed) & set(self.nodes):
            self.lose(node, report=False)  # given up without a message: its agent fences itself
        for action in actions:
            self._carry_out(action)
        return actions

    def _repeat(self, event: ev.Input) -> None:
        """A message with an epoch may be repeated, as to the next coordinator: it counts once. No
        tick before the next deadline changes anything."""
        known = (self.state.record, self.state.seats)  # records never change
        before = deepcopy(self.state, {id(each): each for each in known})
        if hasattr(event, "epoch") or isinstance(event, ev.NodeInventory):
            for action in self.machine.handle(event, self.clock.now):
                assert isinstance(action, act.EmitEvent), action
            assert self.state == before, event
        until = min(next_deadline(before, self.config), self.clock.now + 1e6)
        left = until - self.clock.now
        between = self.clock.now + left * self.clock.stream("dense").random()
        if between < until:
            assert not self.machine.handle(ev.Tick(), between)
            assert self.state == before, (between, until)

    def _carry_out(self, action: act.Action) -> None:
        if isinstance(action, act.EmitEvent) and action.kind is Kind.SIZE:
            told = action.to_event().data
            assert told["from"] == self.told_size, "each change is told once"
            self.told_size = told["to"]
        match action:
            case act.EmitEvent() if self.fed % self.check_every == 0:
                check_event(json.loads(to_line(action.to_event())))
            case act.Note("sizes", epoch, entry):
                last = self.journaled[-1]
                assert last.epoch == epoch
                self.journaled[-1] = EpochRecord.from_dict(
                    last.to_dict() | {"history": last.to_dict()["history"] | dict(entry)}
                )
            case act.WriteRecord(record):
                self._check_written(record)
                self.journal.send(record)
                self.noted.clear()
            case act.Note("gone", node, entry):
                self.noted[node] = entry["cause"]
            case act.Announce(record):
                self._check_announced(record)
                self.announce(record)
            case act.InspectCheckpoints() if self.inspects:
                found = ev.CheckpointsFound(frozenset())
                self.clock.after_delay(lambda: self.feed(found), "inspection")
            case act.CloseEpoch(epoch, cause):
                if REFUSAL in cause:
                    self.failures[epoch][self.size] += 1
                assert self.epoch == epoch
                assert epoch not in self.closed
                self.closed.append(epoch)
            case act.ExportDump(restore, roles):
                assert set(roles) == set(self.roles)
                assert set(roles.values()) <= set(self.state.fleet.nodes)
                assert self.state.phase is Phase.DUMPING
                self.exporting = restore.generation
            case act.DropNode(node):
                self.lose(node, report=False)
            case act.Finish():
                assert self.finished is None
                self.finished = action
                self._check_finish(action)
        if isinstance(action, act.Announce | act.CloseEpoch | act.Pause | act.Dump):
            self._send(action, getattr(action, "nodes", self.state.fleet.nodes))
        elif isinstance(action, act.Welcome | act.StartMembers | act.KillMember):
            self._send(action, [action.node])

    def _send(self, action: act.Action, nodes: Iterable[int]) -> None:
        for node in self.nodes.keys() & nodes:
            self.nodes[node].orders.send(action)

    def _note_journal(self, record: EpochRecord) -> None:
        self.journaled.append(record)
        self.feed(ev.JournalWritten(record.epoch))

    def _note_loss(self, event: ev.Input) -> None:
        counts = isinstance(event, ev.NotFinite) and self.state.phase not in states.LAST_PHASES
        if counts and self.state.lineage.keeps(Generation(event.epoch, event.iteration)):
            self.poisoned_from = event.iteration

    # Rules about decisions.

    def _check_written(self, record: EpochRecord) -> None:
        assert record.epoch > max(self.written, default=0)
        self.written.append(record.epoch)
        size = len(record.seats) // self.sizes.ranks_per_replica
        assert [*record.seats] == [*self.roles_of(size)], "all roles of one size"
        assert len({seat.node for seat in record.seats.values()}) == size, "whole nodes"
        self.failures[record.epoch] = Counter(self.failures[self.epoch])
        assert self.failures[record.epoch][size] < 2, "a size that was struck off"
        assert len(set(record.seats.values())) == len(record.seats)
        self.poor = self.state.fleet.distrusted | self.state.fleet.quarantined
        deciding = self.state.phase_state
        if not isinstance(deciding, states.Deciding) or deciding.redecide:
            return  # overtaken in the same step: it will not be announced
        assert set(record.nodes) == set(self.state.fleet.nodes)
        places = [s for parts in record.restore.sources.values() for f in parts.values() for s in f]
        places += [s for recipe in record.restore.recipes.values() for s in recipe.sources()]
        assert {source.node for source in places} <= set(self.state.fleet.nodes)
        for member in self._seated(record):
            assert member.status is not MemberStatus.KILLED

    def _seated(self, record: EpochRecord) -> list[states.MemberState]:
        members = self.state.fleet.members
        found = [(seat, members[seat.node, seat.local_rank]) for seat in record.seats.values()]
        assert all(member.incarnation == seat.incarnation for seat, member in found)
        return [member for _, member in found]

    def _check_announced(self, record: EpochRecord) -> None:
        assert record.epoch in self.written
        assert record.epoch > self.epoch
        self._seated(record)
        self._check_restore(record)
        self.waits_since = None
        recovery = self.state.recoveries.current
        if recovery is not None and recovery.kind == "planned" and len(recovery.causes) == 1:
            before = {seat.node for seat in self.record.seats.values()}
            moved_to = {seat.node for seat in record.seats.values()} - before
            assert not moved_to & self.poor, "a plan, no failure"
            if len(record.seats) != len(self.record.seats):
                settle = self.config.settings.settle_seconds
                assert len(record.seats) > len(self.record.seats), "no plan shrinks a run"
                assert self.clock.now >= self.changed_at + settle
                reported = self.state.lineage.reported
                again = reported.lineage == self.epoch, reported.iteration
                assert (True, record.restore.generation.iteration) >= again
        if self.record and len(record.seats) != len(self.record.seats):
            self.changed_at = self.clock.now
        if self.poisoned_from is not None and record.restore.kind == "memory":
            assert record.restore.generation.iteration < self.poisoned_from
        self.poisoned_from = self.not_finite = None

    def _check_wait(self) -> None:
        """A run waits no longer than it has to if it can go on at another size."""
        if self.state.phase is not Phase.WAITING_SPARE or not self.is_elastic:
            return
        fleet, limit = self.state.fleet, float(self.config.settings.elastic_wait)
        assert not self.state.lineage.invalidated, "no state is doubted for its size"
        self.waits_since = self.clock.now if self.waits_since is None else self.waits_since
        if self.clock.now > self.waits_since + limit and self.state.lineage.valid:
            assert fleet.places_with(MemberStatus.KILLED) or self.fitting(fleet.members) == 0

    def fitting(self, places: Container[tuple[int, int]]) -> int:
        """The largest size, of those not struck off, for nodes all of whose places are these."""
        fleet, ranks = self.state.fleet, range(self.config.nproc)
        good = fleet.nodes.keys() - fleet.quarantined - fleet.draining
        count = sum(all((node, rank) in places for rank in ranks) for node in good)
        failed = self.state.changes.failed
        return max(
            (n for n in self.sizes.replicas if n <= count and failed.count(n) < 2), default=0
        )

    def _check_restore(self, record: EpochRecord) -> None:
        # Rule 2: training continues from a generation that all have committed, or newer state.
        kept = record.restore.generation if record.restore.kind == "memory" else None
        if self.protected and not (kept is None and len(record.seats) != len(self.roles)):
            assert kept >= self.common
        else:
            self.common = min(self.common, kept) if self.common and kept else None

    def _check_finish(self, finish: act.Finish) -> None:
        # A node that does not write in time keeps the state in memory.
        if finish.keeps_slots or not self.protected:
            return
        if finish.exit_status == 75:
            assert finish.resume.kind == "dump"
            assert finish.resume.generation >= self.common
        assert finish.exit_status != 1 or "no generation" not in finish.reason, finish.reason

    @property
    def protected(self) -> bool:
        """Whether rule 2 promises anything: fewer losses than copies since all were in place."""
        return self.common is not None and self.losses_since_protected <= self.tolerance

    # Events of nodes and members.

    def join(self) -> None:
        number, self.next_node = self.next_node, self.next_node + 1
        orders = Channel[act.Action](self.clock, lambda o: self.obey(here, o), "orders", number)
        here = Node(number, orders, Channel(self.clock, self.feed, "reports", number))
        self.nodes[number] = here
        here.reports.send(here.join())

    def lose(self, node: int, *, report: bool = True) -> None:
        """A machine burns down: the messages that it has sent are still on their way, in order."""
        if (lost := self.nodes.pop(node, None)) is None:
            return
        lost.orders.reset()
        if lost.vault.held:
            self.losses_since_protected += 1
        if report:
            lost.reports.send(ev.NodeLost(node, "connection closed"))
            self.lost.append(lost)
        else:
            lost.reports.reset()

    def see_nan(self, role: int) -> None:
        """A role sees a loss that is not finite, and stands still; others may have committed it."""
        member = self.member_of(role)
        if member is None or member.at is None or member.at.lineage != member.epoch:
            return
        # State that was built or loaded has no loss; it is looked at before the next iteration.
        if member.at.iteration == 0 or member.entered != member.at.iteration:
            return
        member.pause_at, self.common, self.not_finite = 0, None, member.at
        node, iteration = member.seat.node, member.at.iteration
        loss = ev.NotFinite(member.epoch, node, role, iteration, "loss", "nan")
        self.nodes[node].reports.send(loss)

    def end_export(self, path: str) -> None:
        """The dump has become the checkpoint at ``path``, or none (empty)."""
        if self.exporting is not None:
            self.feed(ev.DumpExported(self.exporting, path))
            self.exporting = None

    def restart_coordinator(self, *, landed: bool, received: int = 0, noted: bool = False) -> None:
        """The coordinator is killed, and a successor reads the journal. Agents join again, report
        their processes, and repeat the reports of their members. ``landed``: the record being
        written had become durable. ``received``: the number of orders that had reached each agent,
        which still obeys them; the others are lost. ``noted``: so had the notes of nodes
        given up since the record, which a thread of its own writes."""
        if self.state.phase in states.LAST_PHASES or self.finished is not None:
            return
        if landed:
            self.journaled += self.journal.waiting
        self.poisoned_from = None
        self.journal.reset()
        self.closed.clear()
        self.waits_since = None
        for lost in self.lost:
            lost.reports.reset()
        self.lost.clear()
        self.machine = Machine(self.config, self.clock.now)
        if self.journaled:
            if not noted:
                self.noted.clear()
            self.machine.take_over(self.journaled[-1], self.saved, removed=self.noted)
            line: dict[int, int] = {}
            for record in self.journaled:
                line = keep_lineages(line, record.restore, record.epoch)
            assert self.state.lineage.kept == line, "the newest record has it whole"
            if (last := self.journaled[-1]).epoch > self.epoch:
                self._check_restore(last)
                self.announce(last)
        # A record that was not durable never existed: its number is used again.
        self.written = [record.epoch for record in self.journaled]
        self.failures = {epoch: self.failures[epoch] for epoch in (0, *self.written)}
        for here in self.nodes.values():
            kept = [o for o in [*here.orders.waiting][:received] if not isinstance(o, act.Welcome)]
            unheard = [r for r in here.reports.waiting if not isinstance(r, ev.NodeJoined)]
            here.orders.reset(*kept)
            here.reports.reset(here.join(), *unheard)
            here.is_moved = True

    # Time.

    def tick(self, seconds: float) -> None:
        """Let time pass in which nothing arrives."""
        self.clock.now += seconds
        self.feed(ev.Tick())

    def wait(self, limit: str) -> None:
        """All that can come has come when the seconds of a setting are over."""
        self.settle()
        self.tick(getattr(self.config.settings, limit + "_seconds"))
        self.settle()

    def end_waits(self) -> None:
        """No answer comes any more: time alone must end every wait."""
        for _ in range(100):
            if self.state.phase in (Phase.RUNNING, Phase.ENDED):
                return
            self.tick(400.0)
        raise AssertionError(f"waits for {self.state.waiting_for()}")

    def run_until(self, until: float) -> None:
        """Make the calls that are due by then, and a tick at each deadline; then train."""
        self._run(until)
        if self.clock.now < until < math.inf:
            self.clock.now = until
        self.train_for(self.clock.now - self.rested_at, STEP_SECONDS)

    def settle(self, until: Phase | None = None) -> None:
        """Make the calls that are due, until all rest or the phase is reached."""
        self._run(math.inf, until)

    def _run(self, end: float, phase: Phase | None = None) -> None:
        for _ in range(MAX_CALLS):
            if self.state.phase is phase:
                return
            due, deadline = self.clock.next_at, next_deadline(self.state, self.config)
            if deadline <= self.ticked_at:  # nothing came of it yet
                deadline = self.ticked_at + TICK_SECONDS
            if min(due, deadline) > end or due == end == math.inf:
                break
            if deadline < due:
                self.tick(max(deadline - self.clock.now, 0.0))
                self.ticked_at = self.clock.now
            else:
                self.clock.call_next()
        else:
            raise AssertionError("never at rest")
        if self.clock.next_at == math.inf:
            self.rested_at = self.clock.now

    def train(self) -> None:
        """Two iterations of all roles, if possible."""
        self.iterations_left = 2
        self.stir()
        self.settle()

    def calm_down(self) -> None:
        """Without a failure a run that trains is soon at the largest size that fits."""
        for _ in range(4):
            self.run_until(self.clock.now + self.config.settings.settle_seconds + 1)
            self.settle()
        if self.state.phase is Phase.RUNNING and self.is_elastic:
            fleet = self.state.fleet
            poor = fleet.drains | fleet.distrusted | fleet.deprioritized
            warm = fleet.places_with(MemberStatus.WARM)
            seated = self.state.seats.role_by_place
            assert self.size >= self.fitting({p for p in warm if p[0] not in poor or p in seated})

    # Stories.

    def take_over_quietly(self) -> None:
        """Nothing but the coordinator fails: training continues in its epoch."""
        self.settle()
        members = (member for here in self.nodes.values() for member in here.members.values())
        to_pause = any(member.pause_at is not None for member in members)  # ordered earlier
        if self.state.phase is not Phase.RUNNING or self.state.blame.suspicion or to_pause:
            return
        epoch, known, began = self.state.epoch, knowledge(self.state), self.clock.now
        self.restart_coordinator(landed=True, noted=True)
        differences = {k: (v, known[k]) for k, v in knowledge(self.state).items() if v != known[k]}
        assert not differences, differences
        self.train()
        if self.state.phase is Phase.BOOTSTRAPPING:  # for a spare that was lost before
            self.wait("rejoin")
        if self.state.fleet.removed.keys() - known["nodes"][0]:  # a message took that long
            assert self.clock.now >= began + self.config.settings.rejoin_seconds
            return
        assert self.state.phase is Phase.RUNNING
        assert self.state.epoch == epoch
        assert epoch not in self.closed

    def forget_fault(self, role: int) -> None:
        """A coordinator learns of broken communication and dies: its successor acts on it."""
        self.settle()
        member = self.member_of(role)
        if self.state.phase is not Phase.RUNNING or member is None:
            return
        epoch = self.state.epoch
        fault = ev.MemberFault(*member.seat.to_list(), epoch, "peer closed")
        self.nodes[member.seat.node].report(fault)
        self.settle()
        self.restart_coordinator(landed=True)
        self.wait("rejoin")
        self.tick(0.6)
        # The third time without progress it is the program's own.
        assert epoch in self.closed or self.finished is not None
