"""What lets masters travel as halves: peers keep the owner's bfloat16 weights. Pure.

After the parameter gather every data-parallel peer has the model's bfloat16 weights, those of each
owner's shard included. A peer on the owner's buddy node copies them into a *base* part of its own
slot: from it and the low halves of the fp32 masters the buddy's vault has the masters
(:mod:`deadpool_megatron.vault.compaction`). Such parts serve the own node in their own generation
only: they are never shipped, owed, restored, dumped or counted in a layout's hash.

Which owner a member keeps a base for follows from the epoch record alone, for the member and for
its vault; so the parts have numbers, not names of roles, and a spare's layout is like any other's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.layout.placement import CopyPlacement
from deadpool_megatron.layout.records import EpochRecord, PartInfo

_BASE = "model@"
#: JSON: shard part -> where its masters lie, see :class:`Masters`. Of the role itself.
MASTERS_PART = "model@masters"
MASTER_BYTES = 4
WEIGHT_BYTES = 2


def base_part(number: int) -> str:
    """Name of the part with the weights of the ``number``-th owner that a member keeps them for."""
    return f"{_BASE}{number}"


def is_local_part(name: str) -> bool:
    """Whether a part never leaves the node that made it."""
    return name.startswith(_BASE)


def local_parts(role: int, count: int, nbytes: int, masters_bytes: int) -> list[PartInfo]:
    """The parts that a slot needs: ``count`` bases of ``nbytes``, and where the own masters are."""
    own = (role,)
    bases = [PartInfo(base_part(number), nbytes, own) for number in range(count)]
    return [*bases, PartInfo(MASTERS_PART, masters_bytes, own)]


@dataclass(frozen=True)
class Masters:
    """Where fp32 masters lie in a shard part, and their bfloat16 weights in a base.

    ``runs``: (offset in the part, number of values, offset in the base), offsets in bytes,
    ascending in the part.
    """

    runs: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(count for _, count, _ in self.runs)

    @property
    def base_bytes(self) -> int:
        """Least length of the base."""
        return max((base + WEIGHT_BYTES * count for _, count, base in self.runs), default=0)

    @property
    def saved_bytes(self) -> int:
        """What need not travel, exceptions apart."""
        return self.count * (MASTER_BYTES - WEIGHT_BYTES)

    def gaps(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """(begin, end) of the bytes of a part of ``nbytes`` that are no masters."""
        reached = 0
        for offset, count, _ in self.runs:
            if reached < offset:
                yield reached, offset
            reached = offset + MASTER_BYTES * count
        if reached < nbytes:
            yield reached, nbytes

    def check(self, nbytes: int) -> None:
        """Raise ValueError unless the runs are apart, aligned and inside of ``nbytes``."""
        reached = 0
        for offset, count, base in self.runs:
            aligned = offset % MASTER_BYTES == 0 and base % WEIGHT_BYTES == 0
            if not aligned or offset < reached or count < 1 or base < 0:
                raise ValueError(f"impossible run of masters: {offset}, {count}, {base}")
            reached = offset + MASTER_BYTES * count
        if reached > nbytes:
            raise ValueError(f"masters up to byte {reached} in a part of {nbytes}")

    def to_list(self) -> list[list[int]]:
        """JSON form."""
        return [list(run) for run in self.runs]

    @staticmethod
    def from_list(values: Any) -> Masters:
        """Inverse of :meth:`to_list`. Raises TypeError or ValueError for anything else."""
        return Masters(tuple((int(at), int(count), int(base)) for at, count, base in values))


def pack_masters(masters: Mapping[str, Masters]) -> bytes:
    """Bytes of :data:`MASTERS_PART`."""
    return json.dumps({name: one.to_list() for name, one in masters.items()}).encode()


def unpack_masters(payload: bytes | memoryview) -> dict[str, Masters]:
    """Inverse of :func:`pack_masters`. ValueError, TypeError or AttributeError for garbage."""
    values = json.loads(bytes(payload))
    return {str(name): Masters.from_list(runs) for name, runs in values.items()}


def kept_for(record: EpochRecord, peers: Sequence[int], count: int) -> dict[int, tuple[int, ...]]:
    """Member's role -> owners whose weights it keeps, in the order of its base parts.

    ``peers``: one data-parallel group; ``count``: base parts of each member. The owners that have
    a node for their buddy are dealt out in turn among the peers seated on it; who finds no room
    there, or no peer, ships whole.
    """
    placement = CopyPlacement.of_record(record)
    seats = {role: record.seats[role].node for role in sorted(set(peers)) if role in record.seats}
    found: dict[int, tuple[int, ...]] = dict.fromkeys(seats, ())
    here: dict[int, list[int]] = {}
    for role, node in seats.items():
        here.setdefault(node, []).append(role)
    group = tuple(peers)
    turns = dict.fromkeys(here, 0)
    for owner in seats:
        for node in placement.buddies(owner, group):
            keepers = here.get(node)
            if keepers:
                keeper = keepers[turns[node] % len(keepers)]
                turns[node] += 1
                if len(found[keeper]) < count:
                    found[keeper] = (*found[keeper], owner)
    return found
