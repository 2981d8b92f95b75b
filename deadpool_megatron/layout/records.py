"""Data of decisions, and the decision itself: plain, immutable, JSON-able.

These types are shared by the coordinator, the agents, the vaults and the members; they hold no
behaviour beyond their own encoding. Words are those of docs/design: role, node, epoch, generation.
Parts are told apart by their names.

The cadence: only generations of every n-th iteration are protected. Which those are follows from
their number alone, so that all roles protect the same ones: if a role skipped one on its own
account, no later failure would find a state that all roles have. Slots and lag count protected
generations. Why the gate of the design (section 4) still holds is written in
:mod:`deadpool_megatron.member.protection`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from functools import cached_property
from typing import Any

from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.wire.forms import Coded, Listed

# Moments after training iteration k at which extras are captured, in the order they happen.
BOUNDARIES: tuple[str, ...] = ("step", "evaluation", "save", "validation", "test")
_EXTRAS = "extras@"
_STEP = "step@"
_GRADIENTS = "step@gradients."
#: Values of the parameter groups as the update used them; of no bytes: no step for this generation.
UPDATE_PART = "step@update"
#: JSON: shard part -> [bytes, checksum] after the update. Written by the owner's vault.
SUMS_PART = "step@sums"
# Parity blocks are kept under role numbers of their own, far above those of the run.
PARITY_BASE = 1 << 32


class PartKind(Enum):
    """``SHARD``: of the optimizer's state. ``EXTRAS``: all else that an iteration changes, as of a
    boundary. ``STEP``: the data that recomputes an update (:mod:`.gradient_chain`)."""

    SHARD = "shard"
    EXTRAS = "extras"
    STEP = "step"


def kind_of(name: str) -> PartKind:
    """Return the kind of a part."""
    if name.startswith(_EXTRAS):
        return PartKind.EXTRAS
    return PartKind.STEP if name.startswith(_STEP) else PartKind.SHARD


def extras_part(boundary: str) -> str:
    """Name of the part that holds the extras captured at ``boundary``."""
    return _EXTRAS + boundary


def gradients_part(shard_part: str) -> str:
    """Name of the part with the gradients of an update of ``shard_part``."""
    return _GRADIENTS + shard_part


def shard_of(name: str) -> str | None:
    """Inverse of :func:`gradients_part`; None for any other part."""
    return name.removeprefix(_GRADIENTS) if name.startswith(_GRADIENTS) else None


def is_parity_role(number: int) -> bool:
    """True for the number of a parity block, False for a role of the run."""
    return number >= PARITY_BASE


class NodeUse(StrEnum):
    """The use of a node in the run."""

    TRAINING = "training"
    SPARE = "spare"
    DRAINED = "drained"  # its roles moved when a user asked for it: the spare that is used last
    QUARANTINED = "quarantined"


@dataclass(frozen=True, order=True)
class Generation(Listed):
    """State after ``iteration``, computed in epoch ``lineage``; the newest compares largest."""

    lineage: int
    iteration: int


@dataclass(frozen=True)
class PartInfo(Coded):
    """One contiguous piece of a role's generation, e.g. the flat shard of one inner optimizer.

    ``replicas``: all roles (this one included, ascending) whose bytes of this part are identical,
    as on data-parallel peers without a distributed optimizer; ``(role,)`` for unique bytes.
    ``identity`` says what the bytes mean (names, shapes, slices and dtypes, in their order): equal
    in all replicas, and in nothing else. Empty where that is the whole role's to say.
    """

    name: str
    nbytes: int
    replicas: tuple[int, ...]
    identity: str = ""


@dataclass(frozen=True)
class RoleLayout(Coded):
    """The parts that a role's generation consists of; equal ``layout_hash`` means interchangeable
    bytes: of the same parts, and of a role that is the same of the same model.

    ``peers``: the roles of its data-parallel group, itself included, ascending. ``parts`` holds the
    shard parts first, then what recomputes an update (:mod:`.gradient_chain`) if that is kept, then
    one extras part per boundary; an extras part's ``nbytes`` is its capacity. ``slots``: how many
    generations the owner's segment (and a copy) holds, 2+N or 3+N. ``meaning``: which role of which
    model it is, for people and for :func:`.words.difference`.
    """

    role: int
    parts: tuple[PartInfo, ...]
    peers: tuple[int, ...]
    slots: int
    layout_hash: str
    meaning: str = ""

    @cached_property
    def shard_parts(self) -> tuple[str, ...]:
        """Names of the parts that are neither extras nor what recomputes an update."""
        return tuple(p.name for p in self.parts if kind_of(p.name) is PartKind.SHARD)

    @cached_property
    def step_parts(self) -> tuple[str, ...]:
        """Names of the parts that recompute an update; none where slots have no room for them."""
        return tuple(p.name for p in self.parts if kind_of(p.name) is PartKind.STEP)

    def generations_kept(self, full_every: int) -> int:
        """Return after how many newer generations no restore can need a generation, nor any that
        is computed from it; so many steps are kept.

        The oldest generation that a restore may need is ``slots`` - 1 before the one that is being
        received, and its base at most ``full_every`` - 1 older than that.
        """
        return self.slots + (full_every if self.step_parts else 0)

    @cached_property
    def shape(self) -> tuple[int, int, int, tuple[tuple[str, int, int], ...]]:
        """Return what the size of its slots depends on, equal for most of the roles of a run:
        slots, letters of the meaning, number of peers, and of each part name, bytes and replicas.
        """
        parts = tuple((part.name, part.nbytes, len(part.replicas)) for part in self.parts)
        return self.slots, len(self.meaning), len(self.peers), parts

    def has(self, part: PartInfo) -> bool:
        """Return whether it has a part of which every byte means the same as in ``part``."""
        wanted = part.name, part.nbytes, part.identity
        return any((one.name, one.nbytes, one.identity) == wanted for one in self.parts)


@dataclass(frozen=True)
class Holding(Coded):
    """Sealed parts of one role's generation on one node: promised not to be overwritten."""

    role: int
    generation: Generation
    parts: frozenset[str]


@dataclass(frozen=True)
class Inventory(Coded):
    """All parts that a node can produce, frozen after its vault closed epoch ``epoch``."""

    node: int
    epoch: int
    holdings: tuple[Holding, ...] = ()
    layouts: tuple[RoleLayout, ...] = ()


@dataclass(frozen=True, order=True)
class Seat(Listed):
    """The member that plays a role: a process named by node, local rank and incarnation."""

    node: int
    local_rank: int
    incarnation: int


# Role, part, generation -> places of whole copies, best first; none for a part that the role lacks.
WholeCopies = Callable[[int, str, Generation], tuple["Source", ...]]


class SeatTable(dict[int, Seat]):
    """Role -> seat, never changed, with the lookups that are made for every message.

    Each index is built when it is first asked for and then kept. Thread-safe: two threads may at
    worst build the same index twice.
    """

    @cached_property
    def role_by_place(self) -> Mapping[tuple[int, int], int]:
        """(node, local rank) -> role, whatever the incarnation."""
        return {(seat.node, seat.local_rank): role for role, seat in self.items()}

    @cached_property
    def nodes(self) -> frozenset[int]:
        """Nodes that have a seat."""
        return frozenset(seat.node for seat in self.values())

    def role_of(self, node: int, local_rank: int, incarnation: int) -> int | None:
        """The role this very process has a seat for."""
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
    """Bytes found wrong: ``part`` of ``generation``, sealed under ``role`` on ``node``."""

    node: int
    role: int
    generation: Generation
    part: str

    def to_list(self) -> list[Any]:
        """Return the JSON form, without the node."""
        return [self.role, self.generation.to_list(), self.part]

    @staticmethod
    def from_list(node: int, values: Sequence[Any]) -> BadPart:
        """Inverse of :meth:`to_list`. Raises TypeError or ValueError for anything else."""
        role, generation, part = values
        return BadPart(node, int(role), Generation.from_list(generation), str(part))


@dataclass(frozen=True)
class Decoding(Listed):
    """A way to compute a shard part without a whole copy from ``k`` of k+m coded blocks.

    Block i < k is the part of role ``group[i]`` (zeros behind its end), from k on parity blocks.
    ``blocks``: number of a block -> places that hold it, none where the role has no such part (all
    zeros); the wanted one is not among them.
    """

    group: tuple[int, ...]
    parities: int
    blocks: Mapping[int, tuple[Source, ...]]


@dataclass(frozen=True)
class Replay(Listed):
    """A whole copy of ``base`` and the gradients of ``steps`` (ascending) that lead from it to the
    generation which is restored. ``sources``: generation -> part -> places; whole shard parts for
    the base, gradients and extras for each step.
    """

    base: Generation
    steps: tuple[Generation, ...]
    sources: Mapping[Generation, Mapping[str, tuple[Source, ...]]]


@dataclass(frozen=True)
class Recipe(Coded):
    """Work of a role for shard parts that nobody holds whole: ``decodings`` by part, ``replay``
    for all of them together."""

    decodings: Mapping[str, Decoding] = field(default_factory=dict)
    replay: Replay | None = None

    def covers(self, part: str) -> bool:
        """Return whether it produces a shard part."""
        replay = self.replay
        is_replayed = replay is not None and part in replay.sources[replay.base]
        return part in self.decodings or is_replayed

    def sources(self) -> Iterator[Source]:
        """Yield every place that it reads from."""
        for decoding in self.decodings.values():
            yield from itertools.chain.from_iterable(decoding.blocks.values())
        for parts in self.replay.sources.values() if self.replay is not None else ():
            yield from itertools.chain.from_iterable(parts.values())


@dataclass(frozen=True)
class Restore(Coded):
    """The origin of the state of an epoch.

    ``kind``: ``initial`` (build and start at iteration 0), ``memory`` (sealed slots; ``sources``
    lists for every role and part the nodes to try, best first), ``durable`` (the torch_dist
    checkpoint at ``path``), ``dump`` (slot files that vaults wrote to directory ``path``).
    ``generation`` is what the roles have afterwards and ``boundary`` the last moment after that
    iteration which all roles had reached. ``recipes``: for roles of which no whole copy is left.
    ``identity``: the content of ``path`` when it was noted; empty where it was not read.
    """

    kind: str
    generation: Generation
    boundary: str = "step"
    path: str = ""
    sources: Mapping[int, Mapping[str, tuple[Source, ...]]] = field(default_factory=dict)
    recipes: Mapping[int, Recipe] = field(default_factory=dict)
    identity: str = field(default="", compare=False)

    def of_roles(self, roles: Collection[int]) -> Restore:
        """Return the same with the sources and recipes of these roles only."""
        sources = {role: self.sources[role] for role in roles if role in self.sources}
        recipes = {role: self.recipes[role] for role in roles if role in self.recipes}
        return replace(self, sources=sources, recipes=recipes)


@dataclass(frozen=True)
class EpochRecord(Coded):
    """A decision of the coordinator: immutable, journalled before it is sent.

    ``seats``: role -> member. ``nodes``: all live nodes, spares too. ``fewer_copies``: roles that
    may pass the commit gate with fewer copies than wanted, because no eligible node is left.
    ``emitted_up_to``: last iteration whose log lines have been accepted. ``replicas``: lost nodes
    that the protection survives; ``protection``: how. ``begins``: none of this start of the run was
    open before, so that its command may be another one. ``history``: of the run so far, for a
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
    """The first protected iteration that is not before ``iteration``."""
    return -(-iteration // every) * every


def successors(generation: Generation, restored: Generation, newest: Generation, every: int) -> int:
    """Return the number of generations after ``generation`` that a role has certainly written by
    ``newest``.

    ``restored``: what the epoch of ``newest`` began with; from there on every due iteration was
    written. How many lie between an older generation and ``restored`` is not known here, for the
    cadence may have been another one: only ``restored`` itself is counted.
    """
    begin = max(generation.iteration, restored.iteration)
    since = max(0, newest.iteration // every - begin // every)
    return since + (generation < restored)


def successors_by(record: EpochRecord, newest: Generation) -> Callable[[Generation], int]:
    """:func:`successors` in the epoch of ``record``, of which ``newest`` is sealed somewhere."""
    restored, every = record.restore.generation, record.protection.every
    return lambda generation: successors(generation, restored, newest, every)
