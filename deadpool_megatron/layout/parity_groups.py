"""Groups of roles that share parity blocks, their holders, and recovery from blocks. Pure.

Every vault and the coordinator compute the same answer from the same epoch record, so groups and
holders are never sent. Parity groups over nodes come from REFT (AEC, arXiv 2310.12670), the
rotation of parity over all nodes from RAID 5, and the bound on the load of a node from consistent
hashing with bounded loads (Mirrokni et al., arXiv 1608.01350).

A parity block has its own role number, far above the roles of the run. Such a *parity role* has a
segment, holdings and a layout like the copy of any role of another node.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deadpool_megatron.layout import records
from deadpool_megatron.layout.records import PARITY_BASE, BadPart, Generation, RoleLayout, Source
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.wire.forms import Coded

_PARITY_END = 1 << 52  # every JSON reader keeps numbers below it exact
# The part of a parity role that lists the inputs of its blocks; layouts keep an earlier name of it.
INPUTS = "members"
# The first word of the meaning of a parity role's layout.
_MEANING = "parity"
# A node may get this multiple of its fair share of blocks before the next node on the ring is used.
_SLACK = 1.25
# A node in an unused domain may get up to this multiple before a domain is used twice. Without a
# bound, the few nodes outside a large domain would have to hold all blocks.
_MAX_SLACK = 4
# Fewer candidates than this are put in a list; otherwise the ring of all nodes is searched.
_FEW = 128


def parity_role(roles: Sequence[int], parities: int, number: int) -> int:
    """Return the role number of block ``number`` (from 0) of ``parities`` over ordered ``roles``.

    Groups of other roles or block counts have other role numbers, so their blocks never share a
    segment.
    """
    text = f"{','.join(map(str, roles))}/{parities}/{number}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return PARITY_BASE + int.from_bytes(digest, "little") % (_PARITY_END - PARITY_BASE)


@dataclass(frozen=True)
class ParityGroup:
    """Roles on distinct nodes that share parity blocks.

    ``roles``: ascending; the index of a role is the number of its data block. ``blocks``: role
    numbers of the parity blocks; ``holders``: the node of each. There are fewer blocks than wanted
    if too few nodes are alive.
    """

    roles: tuple[int, ...]
    blocks: tuple[int, ...]
    holders: tuple[int, ...]


class ParityPlacement:
    """All groups for one set of seats and live nodes.

    ``seats`` maps role -> node, ``domains`` each *live* node -> failure domain; roles on other
    nodes are in no group. ``parities``: blocks for each group (m). Immutable, so thread-safe.
    """

    def __init__(
        self,
        seats: Mapping[int, int],
        domains: Mapping[int, str],
        spares: Collection[int],
        plan: ProtectionPlan,
        parities: int,
    ) -> None:
        self.parities = parities
        roles_of: dict[int, list[int]] = {}
        for role in sorted(role for role, node in seats.items() if node in domains):
            roles_of.setdefault(seats[role], []).append(role)
        training = sorted(roles_of, key=lambda node: roles_of[node][0])
        idle = sorted(node for node in set(spares) - set(seats.values()) if node in domains)
        max_size = max(1, min(plan.scheme.group, len(training) + len(idle) - parities))
        # Row i of some nodes: the i-th role of each.
        rows = [
            (nodes, [roles_of[node][row] for node in nodes if row < len(roles_of[node])])
            for nodes in (_split(training, max_size, domains) if training else ())
            for row in range(max(len(roles_of[node]) for node in nodes))
        ]
        holders = _Holders(training, idle, domains, len(rows) * parities)
        self.groups = tuple(
            _group(roles, parities, holders.choose(number, nodes, parities))
            for number, (nodes, roles) in enumerate(rows)
        )
        self.by_role = {role: group for group in self.groups for role in group.roles}
        # Parity role -> its group, and the number of its block (from 0).
        self.by_block = {
            block: (group, number)
            for group in self.groups
            for number, block in enumerate(group.blocks)
        }

    @staticmethod
    def of_record(record: records.EpochRecord) -> ParityPlacement:
        """Return the placement that follows from a record."""
        nodes = records.nodes_of(record.seats, record.nodes)
        return ParityPlacement(*nodes, record.protection, record.replicas)

    def layout(self, number: int, layouts: Mapping[int, RoleLayout]) -> RoleLayout:
        """Return the layout of a parity role of this placement, from those of its group.

        Raises KeyError for another number or when a layout is missing.
        """
        group, block = self.by_block[number]
        return parity_layout(layouts, group, block, self.parities)


def parity_layout(
    layouts: Mapping[int, RoleLayout], group: ParityGroup, number: int, parities: int
) -> RoleLayout:
    """Return the layout of the parity role of block ``number``.

    Each shard part is as long as the longest such part in the group; INPUTS has a size that is
    enough for any content.
    ``peers``: the roles of the group in the order of their data blocks. Raises KeyError when a
    layout of the group is missing.
    """
    sizes: dict[str, int] = {}
    entries_bytes = 256
    for role in group.roles:
        shard_parts = layouts[role].shard_parts
        for part in layouts[role].parts:
            if part.name in shard_parts:
                sizes[part.name] = max(part.nbytes, sizes.get(part.name, 0))
                entries_bytes += 96 + len(json.dumps(part.name))
    role_number = group.blocks[number]
    own = (role_number,)
    hashes = [layouts[role].layout_hash for role in group.roles]
    text = json.dumps([role_number, hashes, list(sizes.items())])
    return RoleLayout(
        role=role_number,
        parts=(
            *(records.PartInfo(name, nbytes, own) for name, nbytes in sizes.items()),
            records.PartInfo(INPUTS, entries_bytes, own),
        ),
        peers=group.roles,
        slots=max(layouts[role].slots for role in group.roles),
        layout_hash=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
        meaning=f"{_MEANING} {number} {parities}",
    )


def parity_numbers(layout: RoleLayout) -> tuple[int, int]:
    """Return the block number and the block count of a parity role's layout.

    Raises ValueError for any other layout.
    """
    fields = layout.meaning.split()
    if len(fields) != 3 or fields[0] != _MEANING:
        raise ValueError(f"role {layout.role} is no parity block")
    return int(fields[1]), int(fields[2])


def combines(block: RoleLayout, layouts: Mapping[int, RoleLayout]) -> bool:
    """Return whether the parity role with layout ``block`` combines state with these ``layouts``;
    False if a layout of its group is unknown."""
    number, parities = parity_numbers(block)
    group = ParityGroup(block.peers, (block.role,) * (number + 1), ())
    if not layouts.keys() >= set(block.peers):
        return False
    return parity_layout(layouts, group, number, parities).layout_hash == block.layout_hash


@dataclass(frozen=True)
class BlockInputs(Coded):
    """The content of the part INPUTS: the parts from which a parity block was made.

    ``group``: roles in the order of their data blocks; ``contributions``: role -> shard part ->
    (nbytes, checksum) of the whole part. A part that a role did not contribute counts as zeros.
    """

    group: tuple[int, ...]
    number: int
    parities: int
    contributions: Mapping[int, Mapping[str, tuple[int, int]]]

    def encode(self) -> bytes:
        """Return the JSON form, which fits in the capacity from :func:`parity_layout`."""
        return json.dumps(self.to_dict(), separators=(",", ":")).encode()

    @staticmethod
    def decode(text: bytes | memoryview) -> BlockInputs:
        """Invert :meth:`encode`. Raises ValueError, KeyError or TypeError for other bytes."""
        return BlockInputs.from_dict(json.loads(bytes(text)))


class ParityIndex:
    """The parity blocks in the inventories, and the shard parts that they can rebuild.

    Only parts without a whole copy are looked up, so the cost depends on the size of the loss, not
    of the run. The layouts of parity roles in the inventories contain all facts that are needed:
    the group, its block count, and the number of each block.
    """

    def __init__(
        self,
        inventories: Iterable[records.Inventory],
        layouts: Mapping[int, RoleLayout],
        bad_parts: frozenset[BadPart],
        copies: records.WholeCopies,
    ) -> None:
        self._inventories = tuple(inventories)
        self._layouts = layouts
        self._bad_parts = bad_parts
        self._copies = copies
        self._groups_of: dict[int, list[_HeldGroup]] | None = None
        self._held: dict[tuple[int, Generation], list[tuple[int, frozenset[str]]]] = {}

    def decodings(self, role: int, part: str, generation: Generation) -> list[records.Decoding]:
        """Return the remaining blocks of each group of ``role`` that has enough of them.

        There may be blocks from groups of several epochs. The group with the most blocks is first,
        since each surplus block can replace a block that turns out to be damaged.
        """
        if self._groups_of is None:
            self._groups_of = self._index()
        found = [
            records.Decoding(group.roles, group.parities, blocks)
            for group in self._groups_of.get(role, ())
            if len(blocks := self._blocks(group, role, part, generation)) >= len(group.roles)
        ]
        return sorted(found, key=lambda each: (len(each.blocks), each.group), reverse=True)

    def _index(self) -> dict[int, list[_HeldGroup]]:
        """Return role -> its groups with blocks in the inventories; also fill ``_held``."""
        groups: dict[tuple[tuple[int, ...], int, tuple[str, ...]], _HeldGroup] = {}
        hashes: dict[int, str] = {}
        for inventory in self._inventories:
            for layout in inventory.layouts:
                if not records.is_parity_role(layout.role) or layout.role in hashes:
                    continue
                if not combines(layout, self._layouts):
                    continue
                hashes[layout.role] = layout.layout_hash
                number, parities = parity_numbers(layout)
                key = (layout.peers, parities, tuple(part.name for part in layout.parts))
                group = groups.setdefault(key, _HeldGroup(layout.peers, parities))
                group.blocks.setdefault(len(layout.peers) + number, []).append(layout.role)
            roles = {x.role for x in inventory.layouts if hashes.get(x.role) == x.layout_hash}
            for holding in inventory.holdings:
                if holding.role in roles and INPUTS in holding.parts:
                    place = (inventory.node, holding.parts)
                    self._held.setdefault((holding.role, holding.generation), []).append(place)
        groups_of: dict[int, list[_HeldGroup]] = {}
        for group in groups.values():
            for role in group.roles:
                groups_of.setdefault(role, []).append(group)
        return groups_of

    def _blocks(
        self, group: _HeldGroup, wanted: int, part: str, generation: Generation
    ) -> dict[int, tuple[Source, ...]]:
        """Return Decoding.blocks for the part of role ``wanted``: data blocks, then parity."""
        blocks = {}
        for number, role in enumerate(group.roles):
            found = () if role == wanted else self._copies(role, part, generation)
            if found or not self._has_part(role, part):
                blocks[number] = found
        for number, roles in sorted(group.blocks.items()):
            if found := tuple(s for role in roles for s in self._sources(role, part, generation)):
                blocks[number] = found
        return blocks

    def _has_part(self, role: int, part: str) -> bool:
        """Return whether a role has the part; a role without a known layout counts as having it."""
        layout = self._layouts.get(role)
        return layout is None or part in layout.shard_parts

    def _sources(self, role: int, part: str, generation: Generation) -> tuple[Source, ...]:
        """Return the nodes that hold an intact block with its intact part INPUTS."""
        bad = self._bad_parts
        return tuple(
            Source(node, role)
            for node, held in self._held.get((role, generation), ())
            if part in held
            and not any(BadPart(node, role, generation, name) in bad for name in (part, INPUTS))
        )


@dataclass
class _HeldGroup:
    """A group of k roles with parity blocks in the inventories. ``blocks``: block number (from k
    on, after the data blocks) -> parity roles; several where several plans led to the same group.
    """

    roles: tuple[int, ...]
    parities: int
    blocks: dict[int, list[int]] = field(default_factory=dict)


def _group(roles: Sequence[int], parities: int, holders: tuple[int, ...]) -> ParityGroup:
    ordered = tuple(sorted(roles))
    blocks = tuple(parity_role(ordered, parities, n) for n in range(len(holders)))
    return ParityGroup(ordered, blocks, holders)


def _split(nodes: Sequence[int], size: int, domains: Mapping[int, str]) -> list[list[int]]:
    """Split nodes into groups of at most ``size``, as even as possible, with distinct domains in
    each group where possible.

    At first node number i is in group i modulo the number of groups: this separates neighbours,
    which often share a rack. A node that takes over roles takes the place of their old node. Then
    nodes that still share a domain are exchanged with nodes of other groups. If more nodes share a
    domain afterwards than is unavoidable, all nodes are dealt out again, domain by domain.
    """
    count = -(-len(nodes) // size)
    groups = [list(nodes[number::count]) for number in range(count)]
    sizes = Counter(domains[node] for node in nodes)
    unavoidable = sum(max(0, in_domain - count) for in_domain in sizes.values())
    if _exchange(groups, domains) > unavoidable:
        rank = {node: number for number, node in enumerate(nodes)}
        first: dict[str, int] = {}
        for node in nodes:
            first.setdefault(domains[node], rank[node])
        dealt = sorted(nodes, key=lambda node: (first[domains[node]], rank[node]))
        groups = [sorted(dealt[number::count], key=rank.__getitem__) for number in range(count)]
    return groups


def _exchange(groups: list[list[int]], domains: Mapping[int, str]) -> int:
    """Exchange nodes that share a domain within their group; return how many still share it."""
    counts = [Counter(domains[node] for node in group) for group in groups]
    groups_with = Counter(domain for count in counts for domain in count)

    def partner(number: int, domain: str) -> tuple[int, int] | None:
        """Return group and place of a node to exchange with a node of ``domain`` in a group."""
        for step in range(1, len(groups) if groups_with[domain] < len(groups) else 0):
            other = (number + step) % len(groups)
            if counts[other][domain]:
                continue
            for place, node in enumerate(groups[other]):
                if not counts[number][domains[node]]:
                    return other, place
        return None

    for number, group in enumerate(groups):
        for place, node in enumerate(group):
            if counts[number][domains[node]] > 1 and (found := partner(number, domains[node])):
                other, place_there = found
                group[place], groups[other][place_there] = groups[other][place_there], node
                for at, added, lost in ((number, group[place], node), (other, node, group[place])):
                    counts[at][domains[added]] += 1
                    counts[at][domains[lost]] -= 1
                groups_with[domains[node]] += 1
                groups_with[domains[group[place]]] += counts[other][domains[group[place]]] > 0
    return sum(nodes - 1 for count in counts for nodes in count.values() if nodes > 1)


class _Holders:
    """The assignment of parity blocks to nodes: outside the group, in unused domains, evenly."""

    def __init__(
        self, training: Sequence[int], idle: Sequence[int], domains: Mapping[int, str], blocks: int
    ) -> None:
        self._training = training
        self._idle = idle
        self._domains = domains
        self._blocks = max(1, blocks)
        self._load = dict.fromkeys((*training, *idle), 0)
        share = blocks / max(1, len(self._load))
        # For each domain: the count of its nodes, the nodes, the maximum blocks of a node, and the
        # count of open nodes, which have fewer blocks than that.
        self._counts = Counter(domains[node] for node in self._load)
        self._nodes: dict[str, list[int]] = {}
        for node in self._load:
            self._nodes.setdefault(domains[node], []).append(node)
        self._caps = dict.fromkeys(self._counts, math.ceil(_SLACK * share))
        self._max_cap = math.ceil(_MAX_SLACK * share)
        self._open_counts = dict(self._counts)
        self._total_open = len(self._load)
        # Block -> spares that a hash prefers for it.
        self._hashed_spares: dict[int, list[int]] = {}
        for node in idle:
            for number in range(math.ceil(share)):
                block = zlib.crc32(f"{node}:{number}".encode()) % self._blocks
                self._hashed_spares.setdefault(block, []).append(node)

    def choose(self, number: int, group: Collection[int], parities: int) -> tuple[int, ...]:
        """Return nodes for all blocks of group ``number``; fewer if too few nodes are alive."""
        excluded = {*group}
        used = {self._domains[node] for node in group}
        chosen: list[int] = []
        for block in range(parities):
            node = self._choose_node(number * parities + block, excluded, used)
            if node is None:
                break
            chosen.append(node)
            excluded.add(node)
            used.add(self._domains[node])
            self._add_block(node)
        return tuple(chosen)

    def _choose_node(self, block: int, excluded: set[int], used: set[str]) -> int | None:
        """Return a node in an unused domain, even above its share; otherwise any other node,
        preferably below its share."""
        unused = len(self._load) - sum(self._counts[domain] for domain in used)
        if unused and self._has_capacity(used):
            return next(
                node
                for node in (self._outside(used, block) if unused < _FEW else self._ring(block))
                if self._domains[node] not in used and self._is_open(node)
            )
        fallback = None
        for node in self._ring(block):
            if node not in excluded:
                if self._is_open(node):
                    return node
                fallback = node if fallback is None else fallback
        return fallback

    def _has_capacity(self, used: set[str]) -> bool:
        """Return whether a node outside these domains may get a block. If all such nodes have their
        share, first raise their share by a block, up to the maximum."""

        def capacity() -> int:
            return self._total_open - sum(self._open_counts[domain] for domain in used)

        if not capacity():
            for domain in self._counts.keys() - used:
                if self._caps[domain] < self._max_cap:
                    self._caps[domain] += 1
                    self._open_counts[domain] = self._counts[domain]
                    self._total_open += self._counts[domain]
        return capacity() > 0

    def _outside(self, used: set[str], block: int) -> list[int]:
        """Return the nodes outside these domains, in an order that is rotated for each block."""
        nodes = [n for domain in self._counts if domain not in used for n in self._nodes[domain]]
        begin = block % len(nodes)
        return nodes[begin:] + nodes[:begin]

    def _is_open(self, node: int) -> bool:
        return self._load[node] < self._caps[self._domains[node]]

    def _add_block(self, node: int) -> None:
        domain = self._domains[node]
        self._load[node] += 1
        if self._load[node] == self._caps[domain]:
            self._open_counts[domain] -= 1
            self._total_open -= 1

    def _ring(self, block: int) -> Iterator[int]:
        """Yield all nodes, the most preferred first. A hash gives each spare its share of blocks;
        the other blocks rotate over the training nodes. So the loss of a spare moves few blocks but
        its own."""
        yield from self._hashed_spares.get(block, ())
        count = len(self._training)
        begin = block * count // self._blocks
        for step in range(begin, begin + count):
            yield self._training[step % count]
        yield from self._idle
