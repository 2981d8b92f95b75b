"""Data of decisions, and the decision itself: plain, immutable, JSON-able.

These types are shared by the coordinator, the agents, the vaults and the members. They have no
behaviour beyond lookups and their own encoding. docs/concepts.md explains role, node, epoch and
generation. Parts are distinguished by their names.

The cadence: only generations of every n-th iteration are protected. The iteration number alone
decides, so all roles protect the same generations. If a role skipped a generation by itself, no
later failure would find a state that all roles have. Slots and lag count protected generations.
:mod:`deadpool_megatron.member.protection` explains why the commit gate still holds then.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Self

from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.layout.shard_map import ShardMap
from deadpool_megatron.wire.forms import Coded, Listed, read, write

# Moments after training iteration k at which extras are captured, in the order they happen.
BOUNDARIES: tuple[str, ...] = ("step", "evaluation", "save", "validation", "test")
_EXTRAS = "extras@"
# Parity blocks are kept under role numbers of their own, far above those of the run.
PARITY_BASE = 1 << 32


def is_extras(name: str) -> bool:
    """Return whether a part holds extras: all state that an iteration changes, except the optimizer
    state, which is in the shard parts."""
    return name.startswith(_EXTRAS)


def extras_part(boundary: str) -> str:
    """Return the name of the part with the extras captured at ``boundary``."""
    return _EXTRAS + boundary


def is_parity_role(number: int) -> bool:
    """Return whether a number is that of a parity block, not of a role of the run."""
    return number >= PARITY_BASE


class NodeUse(StrEnum):
    """The use of a node in the run."""

    TRAINING = "training"
    SPARE = "spare"
    DRAINED = "drained"  # a user moved its roles away: the spare that is used last
    QUARANTINED = "quarantined"


@dataclass(frozen=True, order=True)
class Generation(Listed):
    """State after ``iteration``, computed in epoch ``lineage``; the newest compares largest."""

    lineage: int
    iteration: int


@dataclass(frozen=True)
class PartInfo(Coded):
    """A contiguous piece of a role's generation, for example the flat shard of an inner optimizer.

    ``replicas``: all roles (its own included, ascending) with identical bytes of this part, as on
    data-parallel peers without a distributed optimizer; ``(role,)`` for unique bytes. ``identity``:
    the meaning of the bytes (names, shapes, slices and dtypes, in order), equal in all replicas and
    nowhere else. Empty for a part whose meaning follows from its role.
    """

    name: str
    nbytes: int
    replicas: tuple[int, ...]
    identity: str = ""


@dataclass(frozen=True)
class RoleLayout(Coded):
    """The parts of a role's generation. Equal ``layout_hash`` means interchangeable bytes: the same
    parts of the same role of the same model.

    ``peers``: the roles of its data-parallel group, itself included, ascending. ``parts`` holds the
    shard parts first, then an extras part per boundary, whose ``nbytes`` is its capacity.
    ``slots``: the number of generations in the owner's segment (and in a copy), 2+N or 3+N.
    ``meaning``: the role and its model, for people and for :func:`.descriptions.difference`.
    ``shard_map``: where a run of another size finds its state; it follows from the other fields.
    """

    role: int
    parts: tuple[PartInfo, ...]
    peers: tuple[int, ...]
    slots: int
    layout_hash: str
    meaning: str = ""
    shard_map: ShardMap = field(default=ShardMap(), compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without a map where there is none."""
        form = super().to_dict()
        return form if self.shard_map.nbytes else {k: form[k] for k in form if k != "shard_map"}

    @property
    def without_runs(self) -> RoleLayout:
        """Return the layout without the runs of its shard map, which are large. That is enough for
        the coordinator, which has the layouts of all roles."""
        return replace(self, shard_map=replace(self.shard_map, runs={}))

    @cached_property
    def shard_parts(self) -> tuple[str, ...]:
        """Return the names of the parts with optimizer state."""
        return tuple(p.name for p in self.parts if not is_extras(p.name))

    @cached_property
    def shape(self) -> tuple[int, int, int, tuple[tuple[str, int, int], ...]]:
        """Return the facts that determine the size of the segment: slots, letters of meaning and
        map, number of peers, and name, bytes and replicas of each part. Many roles share them."""
        parts = tuple((part.name, part.nbytes, len(part.replicas)) for part in self.parts)
        letters = len(self.meaning) + self.shard_map.nbytes
        return self.slots, letters, len(self.peers), parts

    def has(self, part: PartInfo) -> bool:
        """Return whether the role has a part whose bytes have the same meaning as ``part``."""
        wanted = part.name, part.nbytes, part.identity
        return any((own.name, own.nbytes, own.identity) == wanted for own in self.parts)


@dataclass(frozen=True)
class Holding(Coded):
    """Sealed parts of a role's generation on a node, which promises not to overwrite them."""

    role: int
    generation: Generation
    parts: frozenset[str]


@dataclass(frozen=True)
class Inventory(Coded):
    """All parts that a node can produce, frozen after its vault closed epoch ``epoch``.

    Most holdings share their generation and parts with others. The JSON form contains each such
    pair once, as all nodes send their inventories at the same moment.
    """

    node: int
    epoch: int
    holdings: tuple[Holding, ...] = ()
    layouts: tuple[RoleLayout, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        pairs = dict.fromkeys((held.generation, held.parts) for held in self.holdings)
        number = {pair: index for index, pair in enumerate(pairs)}
        sealed = [[generation.to_list(), sorted(parts)] for generation, parts in pairs]
        holdings = [[held.role, number[held.generation, held.parts]] for held in self.holdings]
        return {**write(replace(self, holdings=())), "sealed": sealed, "holdings": holdings}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return the object of a JSON form; inverse of :meth:`to_dict`."""
        sealed = {
            index: (Generation.from_list(generation), frozenset(map(str, parts)))
            for index, (generation, parts) in enumerate(values["sealed"])
        }
        holdings = tuple(Holding(int(role), *sealed[index]) for role, index in values["holdings"])
        return replace(read(cls, {**values, "holdings": ()}), holdings=holdings)


@dataclass(frozen=True, order=True)
class Seat(Listed):
    """The member that has a role: a process named by node, local rank and incarnation."""

    node: int
    local_rank: int
    incarnation: int


# Role, part, generation -> places of whole copies, best first; none for a part that the role lacks.
WholeCopies = Callable[[int, str, Generation], tuple["Source", ...]]


class SeatTable(dict[int, Seat]):
    """Role -> seat, immutable, with the lookups that every message needs.

    Each index is built at its first use and then kept. Thread-safe: at worst two threads build the
    same index.
    """

    @cached_property
    def role_by_place(self) -> Mapping[tuple[int, int], int]:
        """Return (node, local rank) -> role, for any incarnation."""
        return {(seat.node, seat.local_rank): role for role, seat in self.items()}

    @cached_property
    def roles(self) -> tuple[int, ...]:
        """Return the roles, ascending."""
        return tuple(sorted(self))

    @cached_property
    def nodes(self) -> frozenset[int]:
        """Return the nodes with a seat."""
        return frozenset(seat.node for seat in self.values())

    def role_of(self, node: int, local_rank: int, incarnation: int) -> int | None:
        """Return the role whose seat this incarnation has, if any."""
        role = self.role_by_place.get((node, local_rank))
        return role if role is not None and self[role].incarnation == incarnation else None


@dataclass(frozen=True)
class NodeAddress(Coded):
    """The address at which a live node's vault listens, and its failure domain."""

    host: str
    vault_port: int
    domain: str
    spare: bool = False


@dataclass(frozen=True)
class Source(Listed):
    """A node that holds the wanted bytes, sealed under ``role`` (another role for a replica)."""

    node: int
    role: int


@dataclass(frozen=True, order=True)
class BadPart:
    """Corrupt bytes: ``part`` of ``generation``, sealed under ``role`` on ``node``."""

    node: int
    role: int
    generation: Generation
    part: str

    def to_list(self) -> list[Any]:
        """Return the JSON form, without the node."""
        return [self.role, self.generation.to_list(), self.part]

    @staticmethod
    def from_list(node: int, values: Sequence[Any]) -> BadPart:
        """Invert :meth:`to_list`. Raises TypeError or ValueError for other values."""
        role, generation, part = values
        return BadPart(node, int(role), Generation.from_list(generation), str(part))


@dataclass(frozen=True)
class Decoding(Listed):
    """The blocks from which a shard part without a whole copy is decoded: any k of k+m.

    Block i < k is the part of role ``group[i]``, padded with zeros; blocks from k on are parity
    blocks. ``blocks``: number of a block -> places that hold it; no place where the role has no
    such part, so that the block is all zeros. The wanted block is left out.
    """

    group: tuple[int, ...]
    parities: int
    blocks: Mapping[int, tuple[Source, ...]]


@dataclass(frozen=True)
class Recipe(Coded):
    """The sources of shard parts of a role of which no whole copy exists.

    ``decodings``: part -> its decoding. ``cut``: roles of another size -> hash of their layouts,
    for a role whose parts are cut from those roles' parts, which may have recipes themselves."""

    decodings: Mapping[str, Decoding] = field(default_factory=dict)
    cut: Mapping[int, str] = field(default_factory=dict)

    def sources(self) -> Iterator[Source]:
        """Yield every place from which the decodings read."""
        for decoding in self.decodings.values():
            yield from itertools.chain.from_iterable(decoding.blocks.values())


@dataclass(frozen=True)
class Restore(Coded):
    """The origin of the state of an epoch.

    ``kind``: ``initial`` (build and start at iteration 0), ``memory`` (sealed slots; ``sources``
    lists for every role and part the nodes to try, best first), ``durable`` (the torch_dist
    checkpoint at ``path``), ``dump`` (slot files that vaults wrote to directory ``path``).
    ``generation``: the generation of all roles afterwards; ``boundary``: the last moment after that
    iteration that all roles had reached. ``recipes``: role -> recipe, for roles without a whole
    copy. ``identity``: the identity of the content of ``path`` when the checkpoint was noted; empty
    if it was not read.
    """

    kind: str
    generation: Generation
    boundary: str = "step"
    path: str = ""
    sources: Mapping[int, Mapping[str, tuple[Source, ...]]] = field(default_factory=dict)
    recipes: Mapping[int, Recipe] = field(default_factory=dict)
    identity: str = field(default="", compare=False)

    def of_roles(self, roles: Collection[int]) -> Restore:
        """Return the restore with only the sources and recipes of these roles, and of the roles
        from which they are cut."""
        cuts = (self.recipes[role].cut for role in roles if role in self.recipes)
        roles = {*roles, *itertools.chain.from_iterable(cuts)}
        sources = {role: self.sources[role] for role in roles if role in self.sources}
        recipes = {role: self.recipes[role] for role in roles if role in self.recipes}
        return replace(self, sources=sources, recipes=recipes)


@dataclass(frozen=True)
class EpochRecord(Coded):
    """A decision of the coordinator, which is immutable and journalled before it is sent.

    ``seats``: role -> member. ``nodes``: all live nodes, spares too. ``fewer_copies``: roles that
    may pass the commit gate with fewer copies than wanted, because no eligible node is left.
    ``emitted_up_to``: last iteration whose log lines have been accepted. ``replicas``: lost nodes
    that the protection survives; ``protection``: its plan. ``begins``: the epoch is the first after
    a start of the run, whose command may have changed. ``history``: the run so far, for a
    coordinator that takes over; agents do not receive it.
    """

    epoch: int
    seats: Mapping[int, Seat]
    nodes: Mapping[int, NodeAddress]
    restore: Restore
    replicas: int = 1
    emitted_up_to: int = 0
    fewer_copies: frozenset[int] = frozenset()
    cause: str = ""
    protection: ProtectionPlan = field(default_factory=ProtectionPlan)
    begins: bool = False
    history: History = field(default_factory=History)


def nodes_of(
    seats: Mapping[int, Seat], nodes: Mapping[int, NodeAddress]
) -> tuple[dict[int, int], dict[int, str], list[int]]:
    """Return the node of each role, the domain of each live node, and the spares."""
    return (
        {role: seat.node for role, seat in seats.items()},
        {node: address.domain for node, address in nodes.items()},
        [node for node, address in nodes.items() if address.spare],
    )


def is_due(iteration: int, every: int) -> bool:
    """Return whether the generation of ``iteration`` is protected."""
    return iteration % every == 0


def next_due(iteration: int, every: int) -> int:
    """Return the first protected iteration from ``iteration`` on."""
    return -(-iteration // every) * every


def successors(generation: Generation, restored: Generation, newest: Generation, every: int) -> int:
    """Return the minimum number of generations, up to ``newest``, that a role wrote after
    ``generation``.

    ``restored``: the first generation of the epoch of ``newest``; from there on every due iteration
    was written. How many lie between an older generation and ``restored`` is unknown, as the
    cadence may have changed, so only ``restored`` itself is counted.
    """
    begin = max(generation.iteration, restored.iteration)
    since = max(0, newest.iteration // every - begin // every)
    return since + (generation < restored)


def successors_by(record: EpochRecord, newest: Generation) -> Callable[[Generation], int]:
    """Return :func:`successors` for the epoch of ``record``; ``newest``: its newest known seal."""
    restored, every = record.restore.generation, record.protection.every
    return lambda generation: successors(generation, restored, newest, every)
