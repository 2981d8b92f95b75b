"""A simulated cluster around the machine: vaults, members, agents, and messages that take time.

Per agent there is one queue in each direction, as with TCP; nothing else is ordered. Vaults keep
what the design says they keep (two slots for own generations and for each copy), members train in
lock step with the commit gate. The world checks the rules of the design as it goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state.fleet import MemberStatus
from deadpool_megatron.cluster.machine.state.phases import LAST_PHASES, Deciding, Phase
from deadpool_megatron.cluster.machine.state.state import Config
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.cadence import is_due
from deadpool_megatron.layout.decision import keep_line
from deadpool_megatron.layout.parity import MEMBERS, ParityGroup, ParityPlacement
from deadpool_megatron.layout.placement import choose_buddies
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    Holding,
    Inventory,
    Restore,
    RoleLayout,
    Seat,
    Source,
)
from deadpool_megatron.layout.schemes import Kind as SchemeKind
from deadpool_megatron.preflight.facts import Link
from deadpool_megatron.recovery import plan
from deadpool_megatron.settings import Settings
from tests.cluster.machine.nodes import Member, Node
from tests.cluster.machine.rig import STEP, layout

EXTRAS = frozenset({"extras@step"})
BLOCK = frozenset({"main", MEMBERS})


class World:
    """Everything outside the machine, and the machine."""

    def __init__(
        self, nodes: int, spares: int, nproc: int, replicas: int, parity_group: int = 0
    ) -> None:
        """``parity_group``: 0 for copies at buddies."""
        scheme: dict[str, Any] = {}
        if parity_group:
            scheme = {"protection": "parity", "parity_group": parity_group}
        scheme["persist_directory"] = "/exports"
        settings = Settings(replicas=replicas, restarts_in_place=10_000, check="links", **scheme)
        self.config = Config(nodes, spares, nproc, settings, "/dump")
        self.machine = Machine(self.config, plan)
        self.now = 0.0
        self.state = self.machine.start(self.now)
        self.nodes: dict[int, Node] = {}
        self.next_node = nodes + spares
        self.journal: deque[EpochRecord] = deque()
        self.journaled: list[EpochRecord] = []
        self.written: list[int] = []
        self.announced: list[EpochRecord] = []
        self.closed: list[int] = []
        self.signal = 100  # every death has its own, so that none counts as a repetition
        self.losses_since_protected = 0
        self.tolerance = 0
        self.common: Generation | None = None
        self.committed: dict[Generation, set[int]] = {}
        self.finished: act.Finish | None = None
        self.exporting: Generation | None = None
        self.block_layouts: dict[int, RoleLayout] = {}
        self.placements: dict[int, ParityPlacement] = {}
        for node in range(nodes + spares):
            self.join(node)

    # The machine and its actions.

    def feed(self, event: ev.Input) -> list[act.Action]:
        before = self.state
        self.state, actions = self.machine.step(self.state, event, self.now)
        waits = self.state.phase not in (Phase.RUNNING, Phase.ENDED)
        assert (self.state.deadline is not None) == waits
        assert self.state.epoch >= before.epoch
        for node in set(self.state.fleet.gone) & set(self.nodes):
            self.lose(node, report=False)  # given up without a word: its agent fences itself
        for action in actions:
            self._carry_out(action)
        return actions

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.WriteRecord(record):
                self._check_written(record)
                self.journal.append(record)
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
            case (
                act.Welcome(node) | act.StartMembers(node) | act.KillMember(node) | act.Probe(node)
            ):
                if node in self.nodes:
                    self.nodes[node].orders.append(action)
            case act.DropNode(node):
                self.lose(node, report=False)
            case act.Finish():
                assert self.finished is None
                self.finished = action
                self._check_finish(action)

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
        if not isinstance(self.state.doing, Deciding) or self.state.doing.redecide:
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
            member = self.state.fleet.members[seat.node, seat.slot]
            assert member.incarnation == seat.incarnation
            assert member.status is not MemberStatus.KILLED

    def _check_announced(self, record: EpochRecord) -> None:
        assert record.epoch in self.written
        assert record.epoch > max((r.epoch for r in self.announced), default=0)
        for seat in record.seats.values():
            assert self.state.fleet.members[seat.node, seat.slot].incarnation == seat.incarnation
        self._check_restore(record)

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
        # A node that does not write in time keeps the state in memory, and the run says so.
        if finish.keeps_slots:
            assert "in memory" in finish.reason
            assert "goes on from it" in finish.reason or "writes it first" in finish.reason
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

    def join(self, node: int) -> None:
        self.nodes[node] = Node()
        self.nodes[node].reports.append(self.nodes[node].join(node))

    def lose(self, node: int, *, report: bool = True) -> None:
        """A machine burns down: what it had said is still on its way, in order."""
        lost = self.nodes.pop(node, None)
        if lost is None:
            return
        if lost.vault.held:
            self.losses_since_protected += 1
        if report:
            self.last_words.append((node, lost.reports))

    @property
    def last_words(self) -> deque[tuple[int, deque[ev.Input]]]:
        return self.__dict__.setdefault("_last_words", deque())  # type: ignore[no-any-return]

    def end_member(self, node: int, slot: int) -> None:
        member = self.nodes[node].members.pop(slot)
        self.signal += 1
        self.nodes[node].reports.append(
            ev.MemberLost(node, slot, member.seat.incarnation, signal=self.signal)
        )

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

    def restart_coordinator(self, *, landed: bool, received: int = 0) -> None:
        """It is killed, and a new one reads the journal. Agents join again, say what they run, and
        repeat what their members said. ``landed``: the record being written had become durable.
        ``received``: so many orders had reached each agent, which still obeys them; the other ones
        are lost."""
        if self.state.phase in LAST_PHASES or self.finished is not None:
            return
        if landed:
            self.journaled += self.journal
        self.journal.clear()
        self.closed.clear()
        self.last_words.clear()
        if self.journaled:
            self.state = self.machine.resume(self.journaled[-1], None, self.now)
            line: dict[int, int] = {}
            for record in self.journaled:
                line = keep_line(line, record.restore, record.epoch)
            assert self.state.line.kept == line, "the newest record has it whole"
        else:
            self.state = self.machine.start(self.now)
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
        epoch = self.state.epoch
        self.restart_coordinator(landed=True)
        self.train()
        self.settle()
        if self.state.phase is Phase.GATHERING:  # for a spare that was lost before
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
        epoch, place = self.state.epoch, (player.seat.node, player.seat.slot)
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

    def obey(self, node: int) -> bool:
        """An agent takes its next order."""
        orders = self.nodes[node].orders
        if not orders:
            return False
        self._obey(node, orders.popleft())
        return True

    def _obey(self, node: int, order: act.Action) -> None:
        here = self.nodes[node]
        match order:
            case act.StartMembers(_, slots):
                for slot, incarnation in slots.items():
                    if here.incarnations.get(slot, -1) >= incarnation:
                        continue  # two coordinators have ordered the same
                    if slot in here.members:  # an earlier coordinator's order was obeyed late
                        self.end_member(node, slot)
                    here.incarnations[slot] = incarnation
                    here.members[slot] = Member(Seat(node, slot, incarnation))
                    here.say(ev.MemberHello(node, slot, incarnation))
            case act.KillMember(_, slot, incarnation):
                member = here.members.get(slot)
                if member is not None and member.seat.incarnation == incarnation:
                    self.end_member(node, slot)
            case act.CloseEpoch(epoch):
                if epoch > here.closed:
                    here.closed = epoch
                    here.vault.close(epoch)
                    for member in here.members.values():
                        member.role, member.at, member.kept = None, None, None
                here.reports.append(ev.NodeInventory(self.inventory(node, epoch)))
            case act.Announce(record) | act.Welcome(_, record):
                if record is not None and record.epoch > here.vault.epoch:
                    self._adopt(node, record)
                if here.moved and isinstance(order, act.Welcome):
                    here.moved = False
                    for member in here.members.values():
                        here.reports += [
                            said
                            for said in member.said.values()
                            if getattr(said, "epoch", here.closed + 1) > here.closed
                        ]
            case act.Pause(epoch, iteration):
                self._pause(here, epoch, iteration)
            case act.Probe(_, number, peers, bulk):
                rate = 1e9 if bulk else None
                links = tuple(Link(peer, "", 1e-4, 0.0, rate) for peer, _, _ in peers)
                here.reports.append(ev.Probed(node, number, links))
            case act.Dump(_, _, generation):
                here.reports.append(ev.Dumped(node, generation))

    def inventory(self, node: int, epoch: int) -> Inventory:
        held = self.nodes[node].vault.held
        return Inventory(
            node,
            epoch,
            tuple(
                Holding(role, one, parts) for (role, parts), kept in held.items() for one in kept
            ),
            tuple(
                self.block_layouts.get(role) or layout(role, self.config.world_size)
                for role in sorted({role for role, _ in held})
            ),
        )

    def _adopt(self, node: int, record: EpochRecord) -> None:
        here = self.nodes[node]
        here.vault.adopt(record)
        if node in record.nodes:
            here.epoch = record.epoch
        for member in here.members.values():
            roles = [role for role, seat in record.seats.items() if seat == member.seat]
            member.epoch, member.role = record.epoch, None
            member.at, member.kept = None, None
            member.pause_at, member.paused = None, False
            if roles:
                member.role = roles[0]
            else:
                here.say(ev.MemberWarm(*member.seat.to_list()))

    def _pause(self, here: Node, epoch: int, iteration: int) -> None:
        for member in here.members.values():
            if member.role is None or member.epoch != epoch or member.at is None:
                continue
            seat = (member.seat.node, member.seat.slot, member.seat.incarnation)
            if member.entered > iteration:
                here.say(ev.PauseRefused(*seat, epoch, member.entered - 1))
            else:
                member.pause_at = iteration
                self._stand_still(here, member)

    def _stand_still(self, here: Node, member: Member) -> None:
        if member.at is not None and member.at.iteration == member.pause_at:
            seat = (member.seat.node, member.seat.slot, member.seat.incarnation)
            here.say(ev.Paused(*seat, member.epoch, member.at.iteration))

    # Work of the open epoch.

    @property
    def record(self) -> EpochRecord | None:
        return self.announced[-1] if self.announced else None

    def player(self, role: int) -> Member | None:
        """The live member of a role, if it knows the newest record and its vault is open."""
        if self.record is None:
            return None
        seat = self.record.seats[role]
        here = self.nodes.get(seat.node)
        member = here.members.get(seat.slot) if here else None
        if here is None or member is None or here.vault.frozen:
            return None
        good = member.seat == seat and member.role == role and member.epoch == self.record.epoch
        return member if good else None

    def restore(self, role: int) -> bool:
        """A member fetches what the record says; only then it takes part."""
        member, record = self.player(role), self.record
        if member is None or record is None or member.at is not None:
            return False
        restore, here = record.restore, self.nodes[member.seat.node]
        seat = (member.seat.node, member.seat.slot, member.seat.incarnation)
        if restore.kind == "memory":
            for part in ("main", "extras@step"):
                if not self._is_given(restore, role, part):
                    text = "no source is alive"
                    here.say(ev.RestoreFailed(*seat, record.epoch, part, text))
                    return True
        member.at = member.kept = restore.generation
        member.entered = restore.generation.iteration
        here.vault.seal(role, restore.generation)
        here.say(
            ev.MemberRegistered(*seat, layout(role, self.config.world_size)),
            ev.Restored(*seat, record.epoch, restore.generation),
        )
        return True

    def _is_given(self, restore: Restore, role: int, part: str) -> bool:
        """Whether a part can be had whole or from enough blocks of nodes that still live."""
        live = self._live(restore, restore.sources[role][part], part)
        recipe = restore.recipes.get(role)
        decoding = recipe.decodings.get(part) if recipe is not None else None
        if live or decoding is None:
            return bool(live)
        blocks = [self._live(restore, found, part) for found in decoding.blocks.values()]
        return sum(map(bool, blocks)) >= len(decoding.group)

    def _live(self, restore: Restore, sources: Iterable[Source], part: str) -> list[Source]:
        live = [source for source in sources if source.node in self.nodes]
        for source in live:  # rule 3: what was promised is there
            vault = self.nodes[source.node].vault
            assert vault.gives(source.role, restore.generation, part)
        return live

    def enter(self) -> bool:
        """All roles pass the gate and the collective of their next iteration together."""
        players = [self.player(role) for role in range(self.config.world_size)]
        ready = [p for p in players if p is not None and p.at is not None]
        if len(ready) < len(players):
            return False
        iterations = {p.at.iteration for p in ready if p.at} | {p.entered for p in ready}
        for role, player in enumerate(ready):
            paused = player.pause_at is not None and player.entered >= player.pause_at
            waits = self.is_due(player.entered + 1) or player.at == player.kept
            if paused or len(iterations) > 1 or (waits and not self.is_committed(role, player)):
                return False
        for player in ready:
            player.entered += 1
        return True

    def complete(self, role: int) -> bool:
        """A role that passed the collective seals; others may be dead by now."""
        member = self.player(role)
        if member is None or member.at is None or member.entered == member.at.iteration:
            return False
        member.at = Generation(member.epoch, member.entered)
        here = self.nodes[member.seat.node]
        if self.is_due(member.entered):
            member.kept = member.at
            here.vault.seal(role, member.at)
        here.reports.append(ev.StepReported(member.epoch, member.entered))
        self._stand_still(here, member)
        return True

    def is_due(self, iteration: int) -> bool:
        """Whether the record wants the generation of ``iteration`` protected."""
        assert self.record is not None
        return is_due(iteration, self.record.protection.every)

    def buddies(self, role: int) -> tuple[int, ...]:
        record = self.record
        assert record is not None
        seats = {r: seat.node for r, seat in record.seats.items()}
        domains = {n: address.domain for n, address in record.nodes.items()}
        spares = {n for n, address in record.nodes.items() if address.spare}
        peers = layout(role, self.config.world_size).peers
        return choose_buddies(role, peers, seats, domains, spares, record.replicas)

    def group(self, role: int) -> ParityGroup | None:
        """With whom a role shares parity blocks in this epoch."""
        record = self.record
        assert record is not None
        if SchemeKind.PARITY not in record.protection.kinds:
            return None
        if record.epoch not in self.placements:
            placement = self.placements[record.epoch] = ParityPlacement.of_record(record)
            layouts = {r: layout(r, self.config.world_size) for r in record.seats}
            for group in placement.groups:
                for block in group.blocks:
                    self.block_layouts[block] = placement.layout(block, layouts)
        return self.placements[record.epoch].group_of(role)

    def owed(self, role: int) -> list[tuple[int, int, frozenset[str]]]:
        """Node, role and parts of everything that has to be elsewhere before a commit."""
        group = self.group(role)
        copies = STEP if group is None else EXTRAS
        owed = [(node, role, copies) for node in self.buddies(role)]
        if group is not None:
            blocks = zip(group.blocks, group.holders, strict=True)
            owed += [(node, block, BLOCK) for block, node in blocks]
        return owed

    def ship(self, role: int) -> bool:
        """The next copy that is missing arrives, or a block for which all roles of the group have
        sealed theirs; if the vaults have the same epoch open."""
        member = self.player(role)
        if member is None or member.kept is None:
            return False
        for node, what, parts in self.owed(role):
            other = self.nodes.get(node)
            if other is None or other.vault.frozen or other.vault.epoch != member.epoch:
                continue
            if other.vault.has(what, member.kept, parts):
                continue
            if parts is BLOCK and not self._all_sealed(role, member):
                continue
            other.vault.seal(what, member.kept, parts)
            for one in range(self.config.world_size):
                if (player := self.player(one)) is not None:
                    self._note_commit(one, player)
            return True
        return False

    def _all_sealed(self, role: int, member: Member) -> bool:
        record, group = self.record, self.group(role)
        assert record is not None
        assert group is not None
        assert member.kept is not None
        for other in group.roles:
            owner = self.nodes.get(record.seats[other].node)
            if owner is None or owner.vault.frozen or owner.vault.epoch != member.epoch:
                return False
            if not owner.vault.has(other, member.kept, STEP):
                return False
        return True

    def is_committed(self, role: int, member: Member) -> bool:
        return member.kept is not None and all(
            node in self.nodes and self.nodes[node].vault.has(what, member.kept, parts)
            for node, what, parts in self.owed(role)
        )

    def _note_commit(self, role: int, member: Member) -> None:
        if member.kept is None or not self.is_committed(role, member):
            return
        roles = self.committed.setdefault(member.kept, set())
        roles.add(role)
        players = [self.player(r) for r in range(self.config.world_size)]
        same = [p for p in players if p is not None and p.kept == member.kept]
        if len(roles) == self.config.world_size:
            self.common = member.kept
        if len(same) == len(players) and all(self.is_committed(r, p) for r, p in enumerate(same)):
            self.losses_since_protected = 0
            self.tolerance = min(len(self.buddies(r)) for r in range(len(players)))
            groups = [group for r in range(len(players)) if (group := self.group(r)) is not None]
            self.tolerance = min([self.tolerance, *(len(group.holders) for group in groups)])

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
        coded = self.record is not None and SchemeKind.PARITY in self.record.protection.kinds
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

    def stale_inputs(self) -> Iterable[ev.Input]:
        """Messages of closed epochs, ended processes and lost nodes."""
        past = [r for r in self.announced if r.epoch != self.state.heard_epoch]
        for record in past[-2:]:
            for seat in list(record.seats.values())[:2]:
                who = (seat.node, seat.slot, seat.incarnation)
                g = record.restore.generation
                yield ev.Restored(*who, record.epoch, g)
                yield ev.RestoreFailed(*who, record.epoch, "main", "late")
                yield ev.MemberFault(*who, record.epoch, "late")
                yield ev.Paused(*who, record.epoch, g.iteration)
                yield ev.PauseRefused(*who, record.epoch, g.iteration + 5)
                yield ev.MemberDone(*who, record.epoch)
            yield ev.StepReported(record.epoch, 10_000)
            yield ev.RolesHung(record.epoch, (0,), "late")
            if self.state.record is not None and record.epoch < self.state.record.epoch:
                for node in record.nodes:
                    yield ev.NodeInventory(Inventory(node, record.epoch))
        for node, slot in list(self.state.fleet.members):
            gone = self.state.fleet.members[node, slot].incarnation - 1
            yield ev.MemberLost(node, slot, gone, signal=9)
            yield ev.MemberHello(node, slot, gone)
            yield ev.MemberWarm(node, slot, gone)
            yield ev.MemberSuspected(node, slot, gone, "late")
        for node in self.state.fleet.gone:
            yield ev.NodeLost(node, "late")
            yield ev.NodeJoined(node, "host", 1, "anywhere")
            yield ev.Dumped(node, Generation(1, 0))
        if self.state.phase is not Phase.DECIDING:
            yield ev.JournalWritten(self.state.epoch)
            yield ev.JournalFailed(self.state.epoch, "late")
        if self.exporting is None:
            yield ev.DumpExported(Generation(1, 0), "/late")

    def feed_stale(self) -> None:
        """Rule 5: none of them changes anything; at most they are refused."""
        for event in list(self.stale_inputs()):
            state, actions = self.machine.step(self.state, event, self.now)
            assert state == self.state, event
            for action in actions:
                refused = isinstance(action, act.EmitEvent) and action.kind is Kind.REFUSED
                assert refused or isinstance(action, act.DropNode), action
