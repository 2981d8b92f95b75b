"""Nodes around the machine, as far as they act by themselves: agents, vaults and members."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.state import Config
from deadpool_megatron.layout import records
from deadpool_megatron.layout.grid import Grid
from deadpool_megatron.layout.parity_groups import INPUTS, ParityGroup, ParityPlacement
from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.ranks import SIZE_STEP, first_role
from deadpool_megatron.layout.schemes import SchemeKind
from deadpool_megatron.layout.shard_map import ShardMap, key_of
from deadpool_megatron.layout.sizes import Sizes
from tests.cluster.machine.rig import STEP, layout
from tests.simulated.clock import Channel, Clock

SLOTS = 2
# A role and the parts that are held of it.
Held = tuple[int, frozenset[str]]
EXTRAS = frozenset({"extras@step"})
BLOCK = frozenset({"main", INPUTS})
REFUSAL = "no room for this size"


@lru_cache
def layout_of(role: int, sizes: Sizes) -> records.RoleLayout:
    """As a role of any size is laid out; where there are sizes, it can be cut."""
    first = first_role(role)
    count = (sizes.replicas[-1] - role // SIZE_STEP) * sizes.ranks_per_replica
    found = replace(layout(role, count), peers=tuple(range(first, first + count)))
    return replace(found, shard_map=ShardMap(nbytes=int(len(sizes.replicas) > 1)))


@dataclass
class Vault:
    """Sealed generations by role (own, copies and parity), and which epoch may add to them."""

    held: dict[Held, set[records.Generation]] = field(default_factory=dict)
    epoch: int = 0
    frozen: bool = True
    promised: dict[Held, frozenset[records.Generation]] = field(default_factory=dict)

    def seal(self, role: int, generation: records.Generation, parts: frozenset[str] = STEP) -> None:
        """Keep the newest SLOTS: never the newest is overwritten, of the others the oldest."""
        assert not self.frozen
        kept = self.held.setdefault((role, parts), set()) | {generation}
        self.held[role, parts] = set(sorted(kept)[-SLOTS:])

    def has(self, role: int, generation: records.Generation, parts: frozenset[str]) -> bool:
        return generation in self.held.get((role, parts), ())

    def gives(self, role: int, generation: records.Generation, part: str) -> bool:
        held = (kept for (of, parts), kept in self.held.items() if of == role and part in parts)
        return any(generation in kept for kept in held)

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
            self.held[role] = {each for each in kept if newest is not None and each <= newest}
        self.epoch, self.frozen, self.promised = record.epoch, False, {}


@dataclass
class Member:
    """A live process. ``at``: the generation its state is, None before it restored; ``kept``: the
    newest protected generation; ``entered``: the iteration whose collective it has passed;
    ``refuses``: the epoch for whose size it has no room.

    ``reported``: its newest report of each kind, which its agent repeats to a new coordinator.
    """

    seat: records.Seat
    epoch: int = 0
    role: int | None = None
    at: records.Generation | None = None
    kept: records.Generation | None = None
    entered: int = 0
    pause_at: int | None = None
    refuses: int = 0
    reported: dict[type[ev.Input], Any] = field(default_factory=dict)


@dataclass
class Node:
    """An agent with its vault, its members and both directions of its connection.

    ``epoch``: that of its record; ``closed``: the newest epoch it has closed;
    ``is_moved``: it has not had the welcome of the present coordinator yet.
    """

    number: int
    orders: Channel[act.Action]
    reports: Channel[ev.Input]
    vault: Vault = field(default_factory=Vault)
    members: dict[int, Member] = field(default_factory=dict)
    incarnations: dict[int, int] = field(default_factory=dict)
    epoch: int = 0
    closed: int = 0
    is_moved: bool = False
    memory_bytes: int = 0

    def report(self, *reports: ev.OfMember) -> None:
        """Report something about members."""
        for each in reports:
            self.members[each.local_rank].reported[type(each)] = each
            self.reports.send(each)

    def join(self) -> ev.NodeJoined:
        """The first message on a new connection."""
        of = {rank: member.reported.get(ev.Restored) for rank, member in self.members.items()}
        restored = {rank: report.epoch for rank, report in of.items() if report is not None}
        running = {rank: member.seat.incarnation for rank, member in self.members.items()}
        place = self.number, "host", self.number, f"node{self.number}"
        known = self.epoch, self.closed, restored, self.memory_bytes
        return ev.NodeJoined(*place, running, dict(self.incarnations), *known)


class Agents:
    """All nodes, and what they do with the newest record. Nothing here knows the machine."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self.config, self.clock = config, clock
        self.nodes: dict[int, Node] = {}
        self.announced: list[records.EpochRecord] = []
        self.signal = 100  # every death has its own, so that none counts as a repetition
        self.losses_since_protected = self.tolerance = 0
        self.common: records.Generation | None = None
        self.not_finite: records.Generation | None = None  # seen by a role of this epoch
        self.committed: dict[records.Generation, set[int]] = {}
        self.block_layouts: dict[int, records.RoleLayout] = {}
        self.groups: Mapping[int, ParityGroup] = {}
        self.iterations_left = 0  # before the roles rest until something happens
        self._is_working = False
        # A model replica is what a node trains.
        self.is_elastic = config.settings.elastic != "off"
        replicas = range(1 if self.is_elastic else config.nodes, config.nodes + 1)
        self.sizes = Sizes(config.nproc, tuple(replicas), grid=Grid(tp=config.nproc))
        self.reported_sizes = self.sizes if self.is_elastic else None
        self.trained = 0  # model replicas of the newest iteration
        self.refusals = 0  # of roles that are to be of another size

    @property
    def record(self) -> records.EpochRecord | None:
        return self.announced[-1] if self.announced else None

    def layout(self, role: int) -> records.RoleLayout:
        return layout_of(role, self.sizes)

    def roles_of(self, size: int) -> range:
        """The roles of a number of model replicas."""
        begin = (self.sizes.replicas[-1] - size) * SIZE_STEP
        return range(begin, begin + size * self.sizes.ranks_per_replica)

    @property
    def roles(self) -> Collection[int]:
        return self.record.seats if self.record else self.roles_of(self.sizes.replicas[-1])

    @property
    def size(self) -> int:
        """The number of model replicas of the newest record."""
        return len(self.roles) // self.sizes.ranks_per_replica

    def end_member(self, node: int, local_rank: int) -> None:
        member = self.nodes[node].members.pop(local_rank)
        self.signal += 1
        self.nodes[node].reports.send(ev.MemberLost(*member.seat.to_list(), signal=self.signal))

    # Orders.

    def obey(self, here: Node, order: act.Action) -> None:
        """An agent takes an order."""
        node = here.number
        match order:
            case act.StartMembers(_, incarnations):
                for local_rank, incarnation in incarnations.items():
                    if here.incarnations.get(local_rank, -1) >= incarnation:
                        continue  # two coordinators have ordered the same
                    if local_rank in here.members:  # an earlier order was obeyed late
                        self.end_member(node, local_rank)
                    here.incarnations[local_rank] = incarnation
                    member = Member(records.Seat(node, local_rank, incarnation))
                    here.members[local_rank] = member
                    here.report(ev.MemberHello(*member.seat.to_list()))
                    if not here.vault.frozen:
                        here.report(ev.MemberWarm(*member.seat.to_list()))
            case act.KillMember(_, local_rank, incarnation):
                member = here.members.get(local_rank)
                if member is not None and member.seat.incarnation == incarnation:
                    self.end_member(node, local_rank)
            case act.CloseEpoch(epoch):
                if epoch > here.closed:
                    here.closed = epoch
                    here.vault.close(epoch)
                    for member in here.members.values():
                        member.role, member.at, member.kept = None, None, None
                here.reports.send(ev.NodeInventory(self._inventory(here, epoch)))
            case act.Announce(record) | act.Welcome(_, record):
                if record is not None and record.epoch > here.vault.epoch:
                    self._adopt(here, record)
                    self.stir()
                if here.is_moved and isinstance(order, act.Welcome):
                    here.is_moved = False
                    reports = [r for m in here.members.values() for r in m.reported.values()]
                    known = here.closed + 1
                    here.reports.send(*(r for r in reports if getattr(r, "epoch", known) >= known))
            case act.Pause(epoch, iteration):
                self._pause(here, epoch, iteration)
            case act.Dump(_, _, generation):
                here.reports.send(ev.Dumped(node, generation))

    def _inventory(self, here: Node, epoch: int) -> records.Inventory:
        held = here.vault.held.items()
        holdings = [records.Holding(r, g, parts) for (r, parts), kept in held for g in kept]
        roles = sorted({role for role, _ in here.vault.held})
        layouts = [self.block_layouts.get(role) or self.layout(role) for role in roles]
        return records.Inventory(here.number, epoch, tuple(holdings), tuple(layouts))

    def _adopt(self, here: Node, record: records.EpochRecord) -> None:
        here.vault.adopt(record)
        here.epoch = record.epoch if here.number in record.nodes else here.epoch
        roles = {seat: role for role, seat in record.seats.items()}
        for member in here.members.values():
            member.epoch, member.role = record.epoch, roles.get(member.seat)
            member.at = member.kept = member.pause_at = None
            if member.role is None:
                here.report(ev.MemberWarm(*member.seat.to_list()))

    def _pause(self, here: Node, epoch: int, iteration: int) -> None:
        for member in here.members.values():
            if member.role is None or member.epoch != epoch or member.at is None:
                continue
            if member.entered > iteration:
                here.report(ev.PauseRefused(*member.seat.to_list(), epoch, member.entered - 1))
            else:
                # After a loss that is not finite a member goes no further for an order.
                member.pause_at = 0 if member.pause_at == 0 else iteration
                self._stand_still(here, member)

    def _stand_still(self, here: Node, member: Member) -> None:
        if member.at is not None and member.at.iteration == member.pause_at:
            here.report(ev.Paused(*member.seat.to_list(), member.epoch, member.at.iteration))

    # Work of the open epoch.

    def stir(self) -> None:
        """Have all roles do their next work, until nothing is left to do."""
        if not self._is_working:
            self._is_working = True
            self.clock.after_delay(self._work, "work")

    def _work(self) -> None:
        """Some of the roles, in any order, do the next thing that they can."""
        self._is_working = False
        draw, roles = self.clock.stream("work"), [*self.roles]
        if self.clock.delay_seconds:
            draw.shuffle(roles)
        active = [role for role in roles if not self.clock.delay_seconds or draw.random() < 0.7]
        if self._go_on(active) or self._go_on(roles):
            self.stir()

    def _go_on(self, roles: list[int]) -> bool:
        moved = [self.restore(role) or self.ship(role) or self.complete(role) for role in roles]
        return self.enter() or any(moved)

    def member_of(self, role: int) -> Member | None:
        """The live member of a role, if it knows the newest record and its vault is open."""
        if self.record is None:
            return None
        seat = self.record.seats[role]
        here = self.nodes.get(seat.node)
        member = here.members.get(seat.local_rank) if here else None
        if member is None or here.vault.frozen or (member.seat, member.role) != (seat, role):
            return None
        return member if member.epoch == self.epoch else None

    def restore(self, role: int) -> bool:
        """A member fetches the state of the record; only then it takes part."""
        member = self.member_of(role)
        if member is None or member.at is not None or member.refuses == self.epoch:
            return False
        restore, here, seat = self.record.restore, self.nodes[member.seat.node], member.seat
        if restore.kind == "memory" and (part := self._lacking_part(restore, role)):
            failed = ev.NotRestored(*seat.to_list(), self.epoch, part, "no source is alive")
            is_new = member.reported.get(ev.NotRestored) != failed
            here.report(*[failed] if is_new else [])
            return is_new
        if self.refusals and self.trained not in (0, self.size):
            self.refusals, member.refuses = self.refusals - 1, self.epoch
            failed = ev.SizeFailed(*seat.to_list(), self.epoch, REFUSAL)
            other = ev.NotRestored(*seat.to_list(), self.epoch, "", REFUSAL)
            here.report(other if self.refusals % 3 == 2 else failed)
            return True
        member.at = member.kept = restore.generation
        member.entered = restore.generation.iteration
        here.vault.seal(role, restore.generation)
        here.report(
            ev.MemberRegistered(*seat.to_list(), self.layout(role), self.reported_sizes),
            ev.Restored(*seat.to_list(), self.epoch, restore.generation),
        )
        return True

    def _lacking_part(self, restore: records.Restore, role: int) -> str:
        """A part of the role, or of an old role from which it is cut, that cannot be had."""
        recipe = restore.recipes.get(role)
        wanted = {"extras@step": (role, "extras@step")}
        for old in recipe.cut if recipe else ():
            wanted[key_of((old, "main"))] = old, "main"
        if len(wanted) == 1:
            wanted["main"] = role, "main"
        return next((key for key, of in wanted.items() if not self._is_given(restore, *of)), "")

    def _is_given(self, restore: records.Restore, role: int, part: str) -> bool:
        """Whether a part can be had whole or from enough blocks of nodes that still live."""
        live = self._is_live(restore, restore.sources[role][part], part)
        recipe = restore.recipes.get(role)
        decoding = recipe.decodings.get(part) if recipe is not None else None
        if live or decoding is None:
            return live
        blocks = [self._is_live(restore, found, part) for found in decoding.blocks.values()]
        return sum(blocks) >= len(decoding.group)

    def _is_live(self, restore: records.Restore, sources: Any, part: str) -> bool:
        live = [source for source in sources if source.node in self.nodes]
        for source in live:  # rule 3: a promised generation is there
            assert self.nodes[source.node].vault.gives(source.role, restore.generation, part)
        return bool(live)

    def _ready(self) -> dict[int, Member]:
        """The members of all roles, if each has a state; else none."""
        ready = {role: m for role in self.roles if (m := self.member_of(role)) and m.at}
        return ready if len(ready) == len(self.roles) else {}

    def enter(self) -> bool:
        """All roles pass the gate and the collective of their next iteration together."""
        members = self._ready() if self.iterations_left else {}
        iterations = {each for m in members.values() for each in (m.at.iteration, m.entered)}
        for role, member in members.items():
            paused = member.pause_at is not None and member.entered >= member.pause_at
            waits = self.is_due(member.entered + 1) or member.at == member.kept
            if paused or len(iterations) > 1 or (waits and not self.is_committed(role, member)):
                return False
        for member in members.values():
            member.entered += 1
        self.iterations_left -= bool(members)
        return bool(members)

    def complete(self, role: int) -> bool:
        """A role that passed the collective seals; others may be dead by now."""
        member = self.member_of(role)
        if member is None or member.at is None or member.entered == member.at.iteration:
            return False
        member.at = records.Generation(member.epoch, member.entered)
        here = self.nodes[member.seat.node]
        if self.is_due(member.entered):
            member.kept = member.at
            here.vault.seal(role, member.at)
        self._report_step(here, member)
        self.trained = self.size
        self._stand_still(here, member)
        return True

    def _report_step(self, here: Node, member: Member) -> None:
        step = ev.StepReported(member.epoch, member.entered)
        member.reported[ev.StepReported] = step
        here.reports.send(step)

    def train_for(self, seconds: float, step_seconds: float) -> None:
        """Let whole iterations pass at once if nothing disturbs them; then a few step by step."""
        members = self._ready()
        iterations = {(m.at, m.entered) for m in members.values()}
        is_calm = len(iterations) == 1 and not self.iterations_left
        self.iterations_left = max(self.iterations_left, 2)
        self.stir()
        count = int(seconds / step_seconds)
        if not is_calm or not count or any(m.pause_at is not None for m in members.values()):
            return
        owed = {role: self.owed(role) for role in self.roles}
        holders = {node for places in owed.values() for node, _, _ in places}
        if any(self.is_behind(node) for node in holders):
            return
        leader = next(iter(members.values()))
        epoch, first = self.record.epoch, leader.entered
        for iteration in (first + count - 1, first + count):
            if not self.is_due(iteration) or iteration <= first:
                continue
            generation = records.Generation(epoch, iteration)
            for role, member in members.items():
                self.nodes[member.seat.node].vault.seal(role, generation)
                for node, key, parts in owed[role]:
                    self.nodes[node].vault.seal(key, generation, parts)
                member.kept = generation
            for role, member in members.items():
                self._note_commit(role, member)
        for member in members.values():
            member.entered, member.at = first + count, records.Generation(epoch, first + count)
        self._report_step(self.nodes[leader.seat.node], leader)

    def is_due(self, iteration: int) -> bool:
        """Whether the record wants the generation of ``iteration`` protected."""
        return records.is_due(iteration, self.record.protection.every)

    def is_behind(self, node: int) -> bool:
        """Whether a node is lost, or has not opened the epoch of the newest record."""
        other = self.nodes.get(node)
        return other is None or other.vault.frozen or other.vault.epoch != self.epoch

    @property
    def epoch(self) -> int:
        return self.record.epoch if self.announced else 0

    def announce(self, record: records.EpochRecord) -> None:
        """Note where each role of a new epoch has its copies and blocks."""
        self.announced.append(record)
        self.copies, self.groups = CopyPlacement.of_record(record), {}
        if record.protection.kind is SchemeKind.PARITY:
            placement = ParityPlacement.of_record(record)
            self.groups, layouts = placement.by_role, {r: self.layout(r) for r in record.seats}
            blocks = [block for group in placement.groups for block in group.blocks]
            self.block_layouts |= {block: placement.layout(block, layouts) for block in blocks}

    def buddies(self, role: int) -> tuple[int, ...]:
        return self.copies.buddies(role, self.layout(role).peers)

    def owed(self, role: int) -> list[tuple[int, int, frozenset[str]]]:
        """Node, role and parts of everything that has to be elsewhere before a commit."""
        group = self.groups.get(role)
        copies = STEP if group is None else EXTRAS
        blocks = () if group is None else zip(group.blocks, group.holders, strict=True)
        owed = [(node, role, copies) for node in self.buddies(role)]
        return owed + [(node, block, BLOCK) for block, node in blocks]

    def ship(self, role: int) -> bool:
        """The next copy that is missing arrives, or a block for which all roles of the group have
        sealed theirs; if the vaults have the same epoch open."""
        member = self.member_of(role)
        if member is None or member.kept is None:
            return False
        group = self.groups.get(role)
        for node, key, parts in self.owed(role):
            if self.is_behind(node) or self.nodes[node].vault.has(key, member.kept, parts):
                continue
            if parts is BLOCK and not all(self._has_sealed(r, member.kept) for r in group.roles):
                continue
            self.nodes[node].vault.seal(key, member.kept, parts)
            for other in [role] if parts is not BLOCK else group.roles:
                if (owner := self.member_of(other)) is not None:
                    self._note_commit(other, owner)
            return True
        return False

    def _has_sealed(self, role: int, generation: records.Generation) -> bool:
        node = self.record.seats[role].node
        return not self.is_behind(node) and self.nodes[node].vault.has(role, generation, STEP)

    def is_committed(self, role: int, member: Member) -> bool:
        return member.kept is not None and all(
            node in self.nodes and self.nodes[node].vault.has(key, member.kept, parts)
            for node, key, parts in self.owed(role)
        )

    def _note_commit(self, role: int, member: Member) -> None:
        known = self.not_finite
        if not self.is_committed(role, member) or (known and member.kept >= known):
            return
        roles = self.committed.setdefault(member.kept, set())
        roles.add(role)
        if len(roles) < len(self.roles):
            return
        self.common = member.kept
        of = {each: self.member_of(each) for each in self.roles}
        if all(m and m.kept == member.kept and self.is_committed(r, m) for r, m in of.items()):
            self.losses_since_protected = 0
            self.tolerance = min(len(self.buddies(each)) for each in self.roles)
            holders = (len(group.holders) for group in self.groups.values())
            self.tolerance = min([self.tolerance, *holders])
