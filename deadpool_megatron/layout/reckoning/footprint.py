"""Memory that segments take, headers and whole pages included. Pure.

Never less than what vault.shm.segment really takes: a plan that fits by these figures does fit.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from deadpool_megatron.layout.part_kinds import gradients_part
from deadpool_megatron.layout.records import RoleLayout
from deadpool_megatron.layout.replaying import generations_kept

# Of the host; 64 KB on many of aarch64.
PAGE_BYTES = max(4096, mmap.PAGESIZE)
# Of a slot's header: eight words, and four for each part (vault/shm/segment.py).
_HEADER_BYTES = 64
_ENTRY_BYTES = 32
# Of the description in JSON: keys and hashes, each part without its name, each role number.
_FIXED_BYTES = 1024
_PART_BYTES = 128
_NUMBER_BYTES = 18
_EXTRAS_GROWTH = 1.5
_EXTRAS_STEP_BYTES = 64 << 10


def extras_room_bytes(extras_bytes: int, least_bytes: int = 0) -> int:
    """Room for the extras of one boundary that take so many bytes at the start: with some to grow
    (longer counters, sums of losses that appear later), in coarse steps; at least ``least_bytes``.
    """
    wanted = max(int(extras_bytes * _EXTRAS_GROWTH) + _EXTRAS_STEP_BYTES, least_bytes)
    return -(-wanted // _EXTRAS_STEP_BYTES) * _EXTRAS_STEP_BYTES


def own_bytes(layout: RoleLayout) -> int:
    """All slots that a member fills."""
    return _layout_bytes(layout.shape, layout.slots, tuple(part.nbytes for part in layout.parts))


def copy_bytes(layout: RoleLayout, nbytes: Iterable[int]) -> int:
    """As many slots on another node, with parts of these sizes; 0 where there are none."""
    sizes = tuple(nbytes)
    return _layout_bytes(layout.shape, layout.slots, sizes) if sizes else 0


def chain_bytes(layout: RoleLayout, copied: Collection[str], full_every: int) -> int:
    """A copy on another node where steps are kept: whole generations of the ``copied`` shard parts,
    and the gradients of more steps than that; extras lie in both."""
    gradients = {gradients_part(name) for name in layout.shard_parts}
    sent = {gradients_part(name) for name in copied}
    known = gradients.union(layout.shard_parts)
    extras = [part.nbytes for part in layout.parts if part.name not in known]
    of_steps = [part.nbytes for part in layout.parts if part.name in sent]
    of_shards = [part.nbytes for part in layout.parts if part.name in copied]
    steps = generations_kept(layout, full_every)
    chain = _layout_bytes(layout.shape, steps, (*of_steps, *extras))
    return copy_bytes(layout, (*of_shards, *extras)) + chain


def block_bytes(slots: int, roles: int, longest: Mapping[str, int]) -> int:
    """A parity block of a group of so many ``roles``. ``longest``: coded part -> its bytes."""
    names = sum(len(name) for name in longest)
    members = 256 + roles * sum(98 + 6 * len(name) for name in longest)
    described = _described(len(longest) + 1, names, roles + len(longest) + 1)
    return _bytes(slots, len(longest) + 1, described, (*longest.values(), members))


@lru_cache(maxsize=1024)
def _layout_bytes(
    shape: tuple[int, int, int, tuple[tuple[str, int, int], ...]],
    slots: int,
    sizes: tuple[int, ...],
) -> int:
    _, letters, peers, parts = shape
    names = sum(len(name) for name, _, _ in parts)
    numbers = peers + sum(replicas for _, _, replicas in parts)
    described = letters + _described(len(parts), names, numbers)
    return _bytes(slots, len(parts), described, sizes)


def _described(parts: int, names: int, numbers: int) -> int:
    """A bound on the description: letters that JSON escapes take six bytes."""
    return _FIXED_BYTES + _PART_BYTES * parts + 6 * names + _NUMBER_BYTES * numbers


def _bytes(slots: int, parts: int, described: int, sizes: Iterable[int]) -> int:
    slot = _pages(_HEADER_BYTES + _ENTRY_BYTES * parts) + sum(_pages(size) for size in sizes)
    return PAGE_BYTES + _pages(described) + slots * slot


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES
