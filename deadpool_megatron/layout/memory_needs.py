"""The memory that generations need. This is the only calculation: the check of a node's budget,
``deadpool protect`` and ``deadpool plan`` use it. Pure.

Memory means the files in /dev/shm, without the buffers of processes. From the bottom of the file
up:

* the size of a segment, with headers and whole pages: never less than vault.shm.segment takes;
* the needs of a plan on each node, from the registered layouts and the code that places copies and
  parity blocks in a run;
* the check whether a plan can protect a run.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec

from deadpool_megatron.layout import schemes
from deadpool_megatron.layout.placement import CopyPlacement, is_covered
from deadpool_megatron.layout.records import PartInfo, RoleLayout
from deadpool_megatron.layout.schemes import MAX_BLOCKS, format_scheme
from deadpool_megatron.settings import LONGEST_CADENCE, SchemeKind, Settings

# The host's page size; 64 KB on many aarch64 hosts.
PAGE_BYTES = max(4096, mmap.PAGESIZE)
# A slot's header has eight words, and four for each part (vault/shm/segment.py).
_HEADER_BYTES = 64
_ENTRY_BYTES = 32
# Bounds of a segment's description in JSON: its keys and hashes, each part without its name, each
# role number.
_FIXED_BYTES = 1024
_PART_BYTES = 128
_NUMBER_BYTES = 18
_EXTRAS_GROWTH = 1.5
_EXTRAS_STEP_BYTES = 64 << 10


@dataclass(frozen=True)
class Shortfall:
    """A node with too little memory."""

    node: int
    needed_bytes: int
    has_bytes: int

    def describe(self) -> str:
        """Return a clause with the bytes that the node needs and has."""
        return (
            f"node {self.node} would need {sized(self.needed_bytes)} of memory for"
            f" generations and has {sized(self.has_bytes)}"
        )


def shortfall(
    plan: schemes.ProtectionPlan, topology: Topology, budgets: Mapping[int, int]
) -> Shortfall | None:
    """Return the node that lacks the most memory for ``plan``; None where all have enough."""
    if not budgets:
        return None
    needs = memory_needs(plan, topology)
    short = [Shortfall(n, needs[n], has) for n, has in budgets.items() if needs.get(n, 0) > has]
    return max(
        short, key=lambda node: (node.needed_bytes - node.has_bytes, -node.node), default=None
    )


def sized(nbytes: int) -> str:
    """Return a size with three digits, in GB or MB."""
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def refusal(
    plan: schemes.ProtectionPlan,
    live_nodes: int,
    settings: Settings,
    present: schemes.ProtectionPlan | None = None,
) -> str:
    """Return why ``plan`` cannot protect the run, with the remedy; empty when it can.

    ``live_nodes`` counts connected nodes, spares included. ``present`` is the plan so far, if any:
    if only the cadence changes, its scheme continues, even if too few nodes are left for it.
    """
    scheme, kind = plan.scheme, plan.kind
    if not 1 <= plan.every <= LONGEST_CADENCE:
        return f"a cadence of {plan.every} is not between 1 and {LONGEST_CADENCE}"
    blocks = schemes.losses_survived(settings, plan)
    if kind is SchemeKind.PARITY and blocks > 1 and find_spec("zfec") is None:
        return (
            f"parity with {blocks} blocks for each group needs the package zfec on all nodes:"
            " pip install '.[parity]' in the checkout"
        )
    if kind is SchemeKind.PARITY and scheme.group < 2:
        return f"a parity group has at least 2 roles, not {scheme.group}"
    if kind is SchemeKind.PARITY and scheme.group + blocks > MAX_BLOCKS:
        return (
            f"a parity group has at most {MAX_BLOCKS - blocks} roles next to {blocks}"
            f" block{'' if blocks == 1 else 's'}, not {scheme.group}: choose a smaller --group"
        )
    # The smallest parity group has two roles on two nodes, and its blocks are on further nodes. A
    # copy is on another node than its role.
    needed = blocks + (2 if kind is SchemeKind.PARITY else 1)
    if (present is None or scheme != present.scheme) and live_nodes < needed:
        return (
            f"{format_scheme(scheme)} that survives {blocks} lost nodes needs at least {needed}"
            f" nodes, there are {live_nodes}: {needed - live_nodes} more needed"
        )
    return ""


@dataclass(frozen=True)
class Topology:
    """The nodes of a run and the roles on them. ``seats``: role -> node; ``domains``: node ->
    failure domain, of each live node, spares included; ``survived``: the number of lost nodes (r)
    that every plan must survive, except a local plan.
    """

    layouts: Mapping[int, RoleLayout]
    seats: Mapping[int, int]
    domains: Mapping[int, str]
    spares: Collection[int]
    survived: int


def memory_by_use(plan: schemes.ProtectionPlan, topology: Topology) -> dict[int, tuple[int, int]]:
    """Return node -> two numbers of bytes, as long as no role has moved: the slots of the roles
    that train there, and everything else that the node keeps (second copies, copies for other
    nodes, parity blocks)."""
    sizing = _Sizing(plan, topology)
    own = sizing.own
    return {node: (own[node], total - own[node]) for node, total in sizing.memory.items()}


def memory_needs(plan: schemes.ProtectionPlan, topology: Topology) -> dict[int, int]:
    """Return node -> bytes of all slots: own, copies, parity blocks."""
    return dict(_Sizing(plan, topology).memory)


@dataclass(frozen=True)
class NodeNeeds:
    """The bytes of one node's generations: ``own`` for the slots of its roles, ``kept`` for copies
    and parity blocks. ``roles``: the number of its roles; ``slots``: the number of generations of
    each role. ``scheme``: a phrase with the use of ``kept``."""

    roles: int
    slots: int
    own: int
    kept: int
    scheme: str

    @property
    def total(self) -> int:
        """Return the bytes in use during training."""
        return self.own + self.kept

    @property
    def peak(self) -> int:
        """Return the bytes in use while processes restart in place: the new processes have created
        their slots already, and restore from the slots of the dead processes."""
        return self.total + self.own

    def describe(self) -> str:
        """Return a phrase that lists the uses of the memory."""
        return (
            f"{sized(self.own)} for own slots ({self.roles} roles x {self.slots} generations)"
            f" + {sized(self.kept)} {self.scheme}"
        )


def node_needs(layout: RoleLayout, roles_per_node: int, settings: Settings) -> NodeNeeds:
    """Return a node's needs before its first slot is created, from the layout of one role. The
    other roles of the node, and the roles whose copies it keeps, are assumed to have the same
    layout: all are slices of one model."""
    kind, copies = settings.protection, settings.copies
    # A part is not copied if enough peers hold the same bytes.
    owed_parts = {
        part.name: part.nbytes
        for part in layout.parts
        if part.name in layout.shard_parts and len(part.replicas) <= copies
    }
    scheme, group = f"for {copies} copies (--deadpool-copies {copies})", 0
    if kind == "parity":
        group = settings.parity_group
        scheme = f"for parity blocks ({copies} for {group} roles)"
    kept = copies * kept_bytes(layout, () if group else owed_parts)
    if group and owed_parts:
        kept += copies * math.ceil(block_bytes(layout.slots, group, owed_parts) / group)
    if kind == "local":
        kept, scheme = 0, "for copies (--deadpool-protection local)"
    elif kind == "local-twice":
        kept = copy_bytes(layout, [part.nbytes for part in layout.parts])
        scheme = "for second copies (--deadpool-protection local-twice)"
    own = own_bytes(layout) * roles_per_node
    return NodeNeeds(roles_per_node, layout.slots, own, kept * roles_per_node, scheme)


def needs_at_size(
    layout: RoleLayout, size: int, other: int, cp: int, roles_per_node: int, settings: Settings
) -> NodeNeeds:
    """Return a node's needs in a run of ``other`` model replicas, from a layout in a run of
    ``size`` replicas. ``cp``: context-parallel size."""

    def resized(part: PartInfo) -> PartInfo:
        if part.name not in layout.shard_parts:
            return part
        if len(part.replicas) == size * cp:  # no distributed optimizer: each peer has the whole
            return replace(part, replicas=part.replicas[: other * cp])
        return replace(part, nbytes=math.ceil(part.nbytes * size / other))

    parts = tuple(map(resized, layout.parts))
    return node_needs(replace(layout, parts=parts), roles_per_node, settings)


class _Sizing:
    """Bytes by node: ``memory`` of all slots, and ``own`` of the slots of the node's roles."""

    def __init__(self, plan: schemes.ProtectionPlan, topology: Topology) -> None:
        self._plan = plan
        self._topology = topology
        self._survived = 0 if plan.kind.is_local else topology.survived
        self._copies = CopyPlacement(
            topology.seats, topology.domains, topology.spares, self._survived
        )
        self._parity = None
        if plan.kind is SchemeKind.PARITY:
            from deadpool_megatron.layout.parity_groups import ParityPlacement

            self._parity = ParityPlacement(
                topology.seats, topology.domains, topology.spares, plan, topology.survived
            )
        self.memory = Counter(dict.fromkeys(topology.domains, 0))
        self.own = Counter[int]()
        for role, layout in topology.layouts.items():
            if role in topology.seats:
                self._add_role(role, layout)
        self._add_parity()

    def _add_role(self, role: int, layout: RoleLayout) -> None:
        """Add the slots of a role, their second copies, and the copies on other nodes."""
        node = self._topology.seats[role]
        own = own_bytes(layout)
        self.memory[node] += own
        self.own[node] += own
        if self._plan.kind is SchemeKind.LOCAL_TWICE:
            self.memory[node] += copy_bytes(layout, [part.nbytes for part in layout.parts])
        copied_parts = [] if self._parity is not None else [part.name for part in self._owed(role)]
        kept = kept_bytes(layout, copied_parts)
        for buddy in self._copies.buddies(role, layout.peers):
            self.memory[buddy] += kept

    def _owed(self, role: int) -> Iterator[PartInfo]:
        """Yield the shard parts of a role that too few peers hold, so that they are copied."""
        topology, layout = self._topology, self._topology.layouts[role]
        for part in layout.parts:
            if part.name in layout.shard_parts and not is_covered(
                part.replicas, role, topology.seats, topology.domains, self._survived
            ):
                yield part

    def _add_parity(self) -> None:
        """Add the blocks of each group. Each part of a block is as long as the longest of the
        parts that it combines."""
        groups = () if self._parity is None else self._parity.groups
        for group in groups:
            longest: dict[str, int] = {}
            for role in group.roles:
                for part in self._owed(role) if role in self._topology.layouts else ():
                    longest[part.name] = max(part.nbytes, longest.get(part.name, 0))
            if longest:
                slots = max(self._topology.layouts[r].slots for r in group.roles)
                for holder in group.holders:
                    self.memory[holder] += block_bytes(slots, len(group.roles), longest)


def extras_capacity_bytes(extras_bytes: int, min_bytes: int = 0) -> int:
    """Return the capacity for the extras of one boundary, from their size at the start. It leaves
    room to grow (longer counters, further sums of losses) and is a multiple of a coarse step, at
    least ``min_bytes``."""
    wanted = max(int(extras_bytes * _EXTRAS_GROWTH) + _EXTRAS_STEP_BYTES, min_bytes)
    return -(-wanted // _EXTRAS_STEP_BYTES) * _EXTRAS_STEP_BYTES


def own_bytes(layout: RoleLayout) -> int:
    """Return the bytes of all slots that a member fills."""
    return _layout_bytes(layout.shape, layout.slots, tuple(part.nbytes for part in layout.parts))


def copy_bytes(layout: RoleLayout, nbytes: Iterable[int]) -> int:
    """Return the bytes of slots on another node, as many as in ``layout``, with parts of these
    sizes; 0 if there are no parts."""
    sizes = tuple(nbytes)
    return _layout_bytes(layout.shape, layout.slots, sizes) if sizes else 0


def kept_bytes(layout: RoleLayout, copied_parts: Collection[str]) -> int:
    """Return the bytes of a copy on another node: ``copied_parts`` of the shard, and extras."""
    left_out = {*layout.shard_parts} - {*copied_parts}
    return copy_bytes(layout, (part.nbytes for part in layout.parts if part.name not in left_out))


def block_bytes(slots: int, roles: int, longest: Mapping[str, int]) -> int:
    """Return the bytes of the slots of a parity block over ``roles`` roles. ``longest``: part ->
    its largest size. A further part lists the block's inputs."""
    names = sum(len(name) for name in longest)
    inputs = 256 + roles * sum(98 + 6 * len(name) for name in longest)
    description = _description_bytes(len(longest) + 1, names, roles + len(longest) + 1)
    return _bytes(slots, len(longest) + 1, description, (*longest.values(), inputs))


@lru_cache(maxsize=1024)
def _layout_bytes(
    shape: tuple[int, int, int, tuple[tuple[str, int, int], ...]],
    slots: int,
    sizes: tuple[int, ...],
) -> int:
    """Return the bytes of a segment. The result is cached, since many roles share a shape."""
    _, letters, peers, parts = shape
    names = sum(len(name) for name, _, _ in parts)
    numbers = peers + sum(replicas for _, _, replicas in parts)
    description = letters + _description_bytes(len(parts), names, numbers)
    return _bytes(slots, len(parts), description, sizes)


def _description_bytes(parts: int, letters: int, numbers: int) -> int:
    """Return a bound on the description of a segment, from counts of parts, of letters in their
    names, and of role numbers. A character that JSON escapes takes six bytes."""
    return _FIXED_BYTES + _PART_BYTES * parts + 6 * letters + _NUMBER_BYTES * numbers


def _bytes(slots: int, parts: int, description: int, sizes: Iterable[int]) -> int:
    slot = _pages(_HEADER_BYTES + _ENTRY_BYTES * parts) + sum(_pages(size) for size in sizes)
    return PAGE_BYTES + _pages(description) + slots * slot


def _pages(nbytes: int) -> int:
    """Return the bytes of whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
