"""A simulated cluster around the machine: its agents, and messages that take time.

Per agent there is one queue in each direction, as with TCP; nothing else is ordered. The world
checks the rules of the design as it goes.
"""

import json
from collections import deque
from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any

from deadpool_megatron.cluster.machine import actions as act, inputs as ev, state as states
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.events import to_line
from deadpool_megatron.layout.planner import keep_lineages
from deadpool_megatron.layout.records import EpochRecord, Generation
from deadpool_megatron.layout.schemes import SchemeKind as SchemeKind
from deadpool_megatron.settings import Settings
from tests.cluster.machine.agents import Agents
from tests.common.event_schema import check_event


def knowledge(state: states.State) -> dict[str, object]:
    """Return what a successor knows of the run at once, from its newest record."""
    line, blame, fleet = state.lineage, state.blame, state.fleet
    return {
        "epoch": (state.record, state.epoch),
        "line": (line.kept, line.invalidated),
        "blame": (blame.failures, blame.nonfinite),
        "nodes": (fleet.removed.keys(), fleet.quarantined, fleet.quarantined_hosts),
        "protection": state.protection.plan,
    }


class World(Agents):
    """Everything outside the machine, and the machine."""

    def __init__(
        self, nodes: int, spares: int, nproc: int, replicas: int, parity_group: int = 0
    ) -> None:
        """``parity_group``: 0 for copies at buddies."""
        scheme: dict[str, Any] = {}
        if parity_group:
            scheme = {"protection": "parity", "parity_group": parity_group}
        scheme |= {"persist_directory": "/exports", "nonfinite": "rollback"}
        settings = Settings(replicas=replicas, restarts_in_place=10_000, **scheme)
        super().__init__(states.Config(nodes, spares, nproc, settings, "/dump"))
        self.now = 0.0
        self.fed = 0
        self.machine = Machine(self.config, self.now)
        self.next_node = nodes + spares
        self.journal: deque[EpochRecord] = deque()
        self.journaled: list[EpochRecord] = []
        self.written: list[int] = []
        self.noted: dict[int, str] = {}  # nodes given up since the newest record
        self.closed: list[int] = []
        self.finished: act.Finish | None = None
        self.exporting: Generation | None = None
        self.poisoned_from: int | None = None  # by a loss that the machine has heard of
        self.last_words: deque[tuple[int, deque[ev.Input]]] = deque()
        for node in range(nodes + spares):
            self.join(node)

    # The machine and its actions.

    @property
    def state(self) -> states.State:
        return self.machine.state

    def feed(self, event: ev.Input) -> list[act.Action]:
        before = self.state.epoch
        self._note_loss(event)
        actions = self.machine.handle(event, self.now)
        self.fed += 1
        if self.fed % 3 == 0 and not isinstance(event, ev.NodeJoined):
            self._hear_twice(event)
        waits = self.state.phase not in (Phase.RUNNING, Phase.ENDED)
        assert (self.state.phase_state.deadline is not None) == waits
        assert self.state.epoch >= before
        for node in set(self.state.fleet.removed) & set(self.nodes):
            self.lose(node, report=False)  # given up without a word: its agent fences itself
        for action in actions:
            self._carry_out(action)
        return actions

    def _hear_twice(self, event: ev.Input) -> None:
        """What carries an epoch may be repeated, as to the next coordinator: it counts once."""
        if not hasattr(event, "epoch") and not isinstance(event, ev.NodeInventory):
            return
        known = (self.state.record, self.state.seats)  # records never change
        before = deepcopy(self.state, {id(one): one for one in known})
        for action in self.machine.handle(event, self.now):
            assert isinstance(action, act.EmitEvent), action
        assert self.state == before, event

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.EmitEvent():
                check_event(json.loads(to_line(action.to_event())))
            case act.WriteRecord(record):
                self._check_written(record)
                self.journal.append(record)
                self.noted.clear()
            case act.RecordRemoved(node, cause):
                self.noted[node] = cause
            case act.Announce(record):
                self._check_announced(record)
                self.announced.append(record)
                self._send_all(action)
            case act.CloseEpoch(epoch):
                assert self.announced[-1].epoch == epoch
                assert epoch not in self.closed
                self.closed.append(epoch)
                self._send_all(action)
            case act.Pause():
                self._send_all(action)
            case act.Dump(nodes):
                for node in set(nodes) & set(self.nodes):
                    self.nodes[node].orders.append(action)
            case act.ExportDump(restore, roles):
                assert set(roles) == set(range(self.config.world_size))
                assert set(roles.values()) <= set(self.state.fleet.nodes)
                assert self.state.phase is Phase.DUMPING
                self.exporting = restore.generation
            case act.Welcome(node) | act.StartMembers(node) | act.KillMember(node):
                if node in self.nodes:
                    self.nodes[node].orders.append(action)
            case act.DropNode(node):
                self.lose(node, report=False)
            case act.Finish():
                assert self.finished is None
                self.finished = action
                self._check_finish(action)

    def _note_loss(self, event: ev.Input) -> None:
        if not isinstance(event, ev.NotFinite) or self.state.phase in states.LAST_PHASES:
            return
        if self.state.lineage.keeps(Generation(event.epoch, event.iteration)):
            self.poisoned_from = event.iteration

    def see_nan(self, role: int) -> None:
        """A role sees a loss that is not finite, and stands still; others may have committed it."""
        player = self.player(role)
        if player is None or player.at is None or player.at.lineage != player.epoch:
            return
        if player.at.iteration == 0:
            return  # what was built or loaded has no loss
        if player.entered != player.at.iteration:
            return  # it has looked at its loss before it had a part in the next iteration
        player.pause_at, self.common = 0, None
        loss = ev.NotFinite(
            player.epoch, player.seat.node, role, player.at.iteration, "loss", "nan"
        )
        self.nodes[player.seat.node].reports.append(loss)

    def end_export(self, path: str) -> None:
        """What was dumped has become a checkpoint, or not (empty)."""
        if self.exporting is not None:
            self.feed(ev.DumpExported(self.exporting, path))
            self.exporting = None

    def _send_all(self, action: act.Action) -> None:
        for node in self.state.fleet.nodes:
            if node in self.nodes:
                self.nodes[node].orders.append(action)

    # Rules about decisions.

    def _check_written(self, record: EpochRecord) -> None:
        assert record.epoch > max(self.written, default=0)
        self.written.append(record.epoch)
        assert set(record.seats) == set(range(self.config.world_size))
        assert len(set(record.seats.values())) == len(record.seats)
        if (
            not isinstance(self.state.phase_state, states.Deciding)
            or self.state.phase_state.redecide
        ):
            return  # overtaken in the same step: it will not be announced
        assert set(record.nodes) == set(self.state.fleet.nodes)
        for parts in record.restore.sources.values():
            for sources in parts.values():
                assert {source.node for source in sources} <= set(self.state.fleet.nodes)
        for recipe in record.restore.recipes.values():
            for decoding in recipe.decodings.values():
                for sources in decoding.blocks.values():
                    assert {source.node for source in sources} <= set(self.state.fleet.nodes)
        for seat in record.seats.values():
            member = self.state.fleet.members[seat.node, seat.local_rank]
            assert member.incarnation == seat.incarnation
            assert member.status is not states.MemberStatus.KILLED

    def _check_announced(self, record: EpochRecord) -> None:
        assert record.epoch in self.written
        assert record.epoch > max((r.epoch for r in self.announced), default=0)
        for seat in record.seats.values():
            assert (
                self.state.fleet.members[seat.node, seat.local_rank].incarnation == seat.incarnation
            )
        self._check_restore(record)
        recovery, fleet = self.state.recoveries.current, self.state.fleet
        if recovery is not None and recovery.kind == "drained" and len(recovery.causes) == 1:
            before = {seat.node for seat in self.announced[-1].seats.values()}
            moved_to = {seat.node for seat in record.seats.values()} - before
            assert not moved_to & (fleet.distrusted | fleet.quarantined), "a plan, no failure"
        if self.poisoned_from is not None and record.restore.kind == "memory":
            assert record.restore.generation.iteration < self.poisoned_from
        self.poisoned_from = None

    def _check_restore(self, record: EpochRecord) -> None:
        # Rule 2: what was committed by all is what training goes on from, or something newer.
        if self.protected:
            assert record.restore.kind == "memory"
            assert self.common is not None
            assert record.restore.generation >= self.common
        elif record.restore.kind != "memory":
            self.common = None
        else:
            kept = record.restore.generation
            self.common = min(self.common, kept) if self.common else None

    def _check_finish(self, finish: act.Finish) -> None:
        # A node that does not write in time keeps the state in memory.
        if finish.keeps_slots:
            return
        if self.protected and finish.exit_status == 75:
            assert finish.resume is not None
            assert finish.resume.kind == "dump"
            assert self.common is not None
            assert finish.resume.generation >= self.common
        if self.protected and finish.exit_status == 1:
            assert "no generation" not in finish.reason, finish.reason

    @property
    def protected(self) -> bool:
        """Whether rule 2 promises anything: fewer losses than copies since all were in place."""
        return self.common is not None and self.losses_since_protected <= self.tolerance

    # Nodes and members.

    def lose(self, node: int, *, report: bool = True) -> None:
        """A machine burns down: what it had said is still on its way, in order."""
        lost = self.nodes.pop(node, None)
        if lost is None:
            return
        if lost.vault.held:
            self.losses_since_protected += 1
        if report:
            self.last_words.append((node, lost.reports))

    # Time and messages.

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.feed(ev.Tick())

    def write_journal(self) -> bool:
        if not self.journal:
            return False
        record = self.journal.popleft()
        self.journaled.append(record)
        self.feed(ev.JournalWritten(record.epoch))
        return True

    def restart_coordinator(
        self, *, landed: bool, received: int = 0, notes_landed: bool = False
    ) -> None:
        """It is killed, and a new one reads the journal. Agents join again, say what they run, and
        repeat what their members said. ``landed``: the record being written had become durable.
        ``received``: so many orders had reached each agent, which still obeys them; the other ones
        are lost. ``notes_landed``: so had the notes of nodes that were given up since the record,
        which a thread of its own writes."""
        if self.state.phase in states.LAST_PHASES or self.finished is not None:
            return
        if landed:
            self.journaled += self.journal
        self.poisoned_from = None
        self.journal.clear()
        self.closed.clear()
        self.last_words.clear()
        self.machine = Machine(self.config, self.now)
        if self.journaled:
            if not notes_landed:
                self.noted.clear()
            self.machine.take_over(self.journaled[-1], (), removed=self.noted)
            line: dict[int, int] = {}
            for record in self.journaled:
                line = keep_lineages(line, record.restore, record.epoch)
            assert self.state.lineage.kept == line, "the newest record has it whole"
        last = self.journaled[-1] if self.journaled else None
        if last is not None and last.epoch > max((r.epoch for r in self.announced), default=0):
            self._check_restore(last)
            self.announced.append(last)
        # A record that was not durable never existed: its number is used again.
        self.written = [record.epoch for record in self.journaled]
        for node, here in self.nodes.items():
            kept = [o for o in list(here.orders)[:received] if not isinstance(o, act.Welcome)]
            unheard = [r for r in here.reports if not isinstance(r, ev.NodeJoined)]
            here.orders, here.reports = deque(kept), deque([here.join(node), *unheard])
            here.moved = True

    def take_over_quietly(self) -> None:
        """Nothing but the coordinator fails: nobody notices."""
        self.settle()
        members = (member for here in self.nodes.values() for member in here.members.values())
        to_pause = any(member.pause_at is not None for member in members)  # ordered earlier
        if self.state.phase is not Phase.RUNNING or self.state.blame.suspicion or to_pause:
            return
        epoch, known = self.state.epoch, knowledge(self.state)
        self.restart_coordinator(landed=True, notes_landed=True)
        differences = {k: (v, known[k]) for k, v in knowledge(self.state).items() if v != known[k]}
        assert not differences, differences
        self.train()
        self.settle()
        if self.state.phase is Phase.BOOTSTRAPPING:  # for a spare that was lost before
            self.tick(self.config.settings.rejoin_seconds)
            self.settle()
        assert self.state.phase is Phase.RUNNING
        assert self.state.epoch == epoch
        assert epoch not in self.closed

    def forget_fault(self, role: int) -> None:
        """A coordinator hears of broken communication and dies: the next one acts on it."""
        self.settle()
        player = self.player(role)
        if self.state.phase is not Phase.RUNNING or player is None:
            return
        epoch, place = self.state.epoch, (player.seat.node, player.seat.local_rank)
        fault = ev.MemberFault(*place, player.seat.incarnation, epoch, "peer closed")
        self.nodes[place[0]].say(fault)
        self.settle()
        self.restart_coordinator(landed=True)
        self.settle()
        self.tick(self.config.settings.rejoin_seconds)
        self.settle()
        self.tick(0.6)
        # The third time without progress it is the program's own.
        assert epoch in self.closed or self.finished is not None

    def hear(self, node: int) -> bool:
        """The machine takes the next report of an agent."""
        reports = self.nodes[node].reports
        if not reports:
            return False
        self.feed(reports.popleft())
        return True

    def hear_last_words(self) -> bool:
        if not self.last_words:
            return False
        node, reports = self.last_words[0]
        if reports:
            self.feed(reports.popleft())
        else:
            self.last_words.popleft()
            self.feed(ev.NodeLost(node, "connection closed"))
        return True

    # Stretches.

    def settle(self, until: Phase | None = None, limit: int = 400) -> None:
        """Messages, journal and work until nothing moves or the phase is reached; no training."""
        for _ in range(limit):
            moved = False
            for act_once in self._moves():
                if self.state.phase is until:
                    return
                moved |= act_once()
            if not moved:
                return

    def _moves(self) -> Iterable[Callable[[], bool]]:
        yield self.hear_last_words
        yield self.write_journal
        for node in list(self.nodes):
            yield lambda node=node: node in self.nodes and self.obey(node)  # type: ignore[misc]
            yield lambda node=node: node in self.nodes and self.hear(node)  # type: ignore[misc]
        for role in range(self.config.world_size):
            yield lambda role=role: self.restore(role)  # type: ignore[misc]

    def train(self) -> None:
        """One iteration of all roles with all copies, if possible."""
        roles = range(self.config.world_size)
        coded = self.record is not None and self.record.protection.kind is SchemeKind.PARITY
        copies = self.config.settings.replicas * (2 if coded else 1)
        for _ in range(copies):
            for role in roles:
                self.ship(role)
        if self.enter():
            for role in roles:
                self.complete(role)
            for _ in range(copies):
                for role in roles:
                    self.ship(role)
