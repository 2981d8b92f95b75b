"""Nodes around the machine, as far as they act by themselves: agents, vaults, members, queues."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.state import Config
from deadpool_megatron.layout import records
from deadpool_megatron.layout.parity_groups import MEMBERS, ParityGroup, ParityPlacement
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.schemes import SchemeKind as SchemeKind
from tests.cluster.machine.rig import STEP, layout

SLOTS = 2
# A role and the parts that are held of it.
Held = tuple[int, frozenset[str]]
EXTRAS = frozenset({"extras@step"})
BLOCK = frozenset({"main", MEMBERS})


@dataclass
class Vault:
    """Sealed generations by role (own, copies and parity), and which epoch may add to them."""

    held: dict[Held, set[records.Generation]] = field(default_factory=dict)
    epoch: int = 0
    frozen: bool = True
    promised: dict[Held, frozenset[records.Generation]] = field(default_factory=dict)

    def seal(self, role: int, generation: records.Generation, parts: frozenset[str] = STEP) -> None:
        """Keeps the newest SLOTS: never the newest is overwritten, of the others the oldest."""
        assert not self.frozen
        kept = self.held.setdefault((role, parts), set()) | {generation}
        self.held[role, parts] = set(sorted(kept)[-SLOTS:])

    def has(self, role: int, generation: records.Generation, parts: frozenset[str]) -> bool:
        return generation in self.held.get((role, parts), ())

    def gives(self, role: int, generation: records.Generation, part: str) -> bool:
        return any(
            of == role and part in parts and generation in kept
            for (of, parts), kept in self.held.items()
        )

    def close(self, epoch: int) -> None:
        self.frozen = True
        self.promised = {role: frozenset(kept) for role, kept in self.held.items()}
        self.epoch = max(self.epoch, epoch)

    def adopt(self, record: records.EpochRecord) -> None:
        # Rule 3: between its inventory and the next record a vault changes nothing.
        if self.frozen and self.promised:
            assert self.promised == {role: frozenset(kept) for role, kept in self.held.items()}
        newest = record.restore.generation if record.restore.kind == "memory" else None
        for role, kept in self.held.items():
            self.held[role] = {one for one in kept if newest is not None and one <= newest}
        self.epoch, self.frozen, self.promised = record.epoch, False, {}


@dataclass
class Member:
    """A live process. ``at``: the generation its state is, None before it restored; ``kept``: the
    newest one that is protected.

    ``said``: its newest report of each kind, which its agent repeats to a new coordinator.
    """

    seat: records.Seat
    epoch: int = 0
    role: int | None = None
    at: records.Generation | None = None
    kept: records.Generation | None = None
    entered: int = 0  # the iteration whose collective it has passed
    pause_at: int | None = None
    paused: bool = False
    said: dict[type[ev.Input], ev.OfMember] = field(default_factory=dict)


@dataclass
class Node:
    """An agent with its vault, its members and its two queues.

    ``epoch``: of the record that it follows; ``closed``: the newest epoch it has closed; ``moved``:
    it has not had the welcome of the present coordinator yet.
    """

    vault: Vault = field(default_factory=Vault)
    members: dict[int, Member] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    orders: deque[act.Action] = field(default_factory=deque)
    reports: deque[ev.Input] = field(default_factory=deque)
    epoch: int = 0
    closed: int = 0
    moved: bool = False

    def say(self, *reports: ev.OfMember) -> None:
        """Report something about members."""
        for report in reports:
            self.members[report.local_rank].said[type(report)] = report
            self.reports.append(report)

    def join(self, number: int) -> ev.NodeJoined:
        """The first message on a new connection."""
        restored = {
            slot: said.epoch
            for slot, member in self.members.items()
            if isinstance(said := member.said.get(ev.Restored), ev.Restored)
        }
        return ev.NodeJoined(
            number,
            "host",
            number,
            f"node{number}",
            {slot: member.seat.incarnation for slot, member in self.members.items()},
            dict(self.incarnations),
            self.epoch,
            self.closed,
            restored,
        )


class Agents:
    """All nodes, and what they do with the newest record. Nothing here knows the machine."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.nodes: dict[int, Node] = {}
        self.announced: list[records.EpochRecord] = []
        self.signal = 100  # every death has its own, so that none counts as a repetition
        self.losses_since_protected = 0
        self.tolerance = 0
        self.common: records.Generation | None = None
        self.committed: dict[records.Generation, set[int]] = {}
        self.block_layouts: dict[int, records.RoleLayout] = {}
        self.placements: dict[int, ParityPlacement] = {}

    def join(self, node: int) -> None:
        self.nodes[node] = Node()
        self.nodes[node].reports.append(self.nodes[node].join(node))

    def end_member(self, node: int, slot: int) -> None:
        member = self.nodes[node].members.pop(slot)
        self.signal += 1
        self.nodes[node].reports.append(
            ev.MemberLost(node, slot, member.seat.incarnation, signal=self.signal)
        )

    # Orders.

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
                    here.members[slot] = Member(records.Seat(node, slot, incarnation))
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
            case act.Dump(_, _, generation):
                here.reports.append(ev.Dumped(node, generation))

    def inventory(self, node: int, epoch: int) -> records.Inventory:
        held = self.nodes[node].vault.held
        return records.Inventory(
            node,
            epoch,
            tuple(
                records.Holding(role, one, parts)
                for (role, parts), kept in held.items()
                for one in kept
            ),
            tuple(
                self.block_layouts.get(role) or layout(role, self.config.world_size)
                for role in sorted({role for role, _ in held})
            ),
        )

    def _adopt(self, node: int, record: records.EpochRecord) -> None:
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
            seat = member.seat.to_list()
            if member.entered > iteration:
                here.say(ev.PauseRefused(*seat, epoch, member.entered - 1))
            else:
                # Who stands still since a loss that is not finite goes no further for an order.
                member.pause_at = 0 if member.pause_at == 0 else iteration
                self._stand_still(here, member)

    def _stand_still(self, here: Node, member: Member) -> None:
        if member.at is not None and member.at.iteration == member.pause_at:
            here.say(ev.Paused(*member.seat.to_list(), member.epoch, member.at.iteration))

    # Work of the open epoch.

    @property
    def record(self) -> records.EpochRecord | None:
        return self.announced[-1] if self.announced else None

    def player(self, role: int) -> Member | None:
        """The live member of a role, if it knows the newest record and its vault is open."""
        if self.record is None:
            return None
        seat = self.record.seats[role]
        here = self.nodes.get(seat.node)
        member = here.members.get(seat.local_rank) if here else None
        if here is None or member is None or here.vault.frozen:
            return None
        good = member.seat == seat and member.role == role and member.epoch == self.record.epoch
        return member if good else None

    def restore(self, role: int) -> bool:
        """A member fetches what the record says; only then it takes part."""
        member, record = self.player(role), self.record
        if member is None or record is None or member.at is not None:
            return False
        restore, here, seat = record.restore, self.nodes[member.seat.node], member.seat.to_list()
        if restore.kind == "memory":
            for part in ("main", "extras@step"):
                if not self._is_given(restore, role, part):
                    text = "no source is alive"
                    here.say(ev.NotRestored(*seat, record.epoch, part, text))
                    return True
        member.at = member.kept = restore.generation
        member.entered = restore.generation.iteration
        here.vault.seal(role, restore.generation)
        here.say(
            ev.MemberRegistered(*seat, layout(role, self.config.world_size)),
            ev.Restored(*seat, record.epoch, restore.generation),
        )
        return True

    def _is_given(self, restore: records.Restore, role: int, part: str) -> bool:
        """Whether a part can be had whole or from enough blocks of nodes that still live."""
        live = self._live(restore, restore.sources[role][part], part)
        recipe = restore.recipes.get(role)
        decoding = recipe.decodings.get(part) if recipe is not None else None
        if live or decoding is None:
            return bool(live)
        blocks = [self._live(restore, found, part) for found in decoding.blocks.values()]
        return sum(map(bool, blocks)) >= len(decoding.group)

    def _live(
        self, restore: records.Restore, sources: Iterable[records.Source], part: str
    ) -> list[records.Source]:
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
        member.at = records.Generation(member.epoch, member.entered)
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
        return records.is_due(iteration, self.record.protection.every)

    def buddies(self, role: int) -> tuple[int, ...]:
        assert self.record is not None
        peers = layout(role, self.config.world_size).peers
        return CopyPlacement.of_record(self.record).buddies(role, peers)

    def group(self, role: int) -> ParityGroup | None:
        """With whom a role shares parity blocks in this epoch."""
        record = self.record
        assert record is not None
        if record.protection.kind is not SchemeKind.PARITY:
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
