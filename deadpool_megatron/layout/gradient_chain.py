"""Gradient steps: the data that recomputes generation k of a role from k - 1. Pure.

In addition to shard parts and extras a slot may hold the *step* that led to it: for each shard part
gradients that its update used (reduced and clipped), the values of the parameter groups which the
update used, and the checksums of the shard parts after it. A whole copy of a generation and all
later steps give every later generation, and the checksums show whether its bytes are right. The
idea is REFT's asynchronous optimizer recompute (AOR).

A *chain* of generation g: a whole copy of some base b and the steps of b+1 .. g, which are
consecutive iterations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from deadpool_megatron.layout import records
from deadpool_megatron.layout.records import SUMS_PART, UPDATE_PART, BadPart, Generation, PartInfo

SUMS_BYTES = 4096
#: Reported by a member whose replay of intact bytes gave other bytes than the owner had.
REPLAY = "replay"


def step_parts(gradients: Mapping[str, PartInfo], update_bytes: int, role: int) -> list[PartInfo]:
    """Return the parts of a step: gradients of each shard part, and space for the values.

    ``gradients``: shard part -> its gradients, under any name.
    """
    found = [
        PartInfo(records.gradients_part(shard), info.nbytes, info.replicas)
        for shard, info in gradients.items()
    ]
    own = (role,)
    return [*found, PartInfo(UPDATE_PART, update_bytes, own), PartInfo(SUMS_PART, SUMS_BYTES, own)]


def pack_sums(sums: Mapping[str, tuple[int, int]]) -> bytes:
    """Return the bytes of :data:`SUMS_PART`: shard part -> (bytes, checksum)."""
    return json.dumps({name: list(entry) for name, entry in sums.items()}).encode()


def unpack_sums(payload: bytes | memoryview) -> dict[str, tuple[int, int]]:
    """Invert :func:`pack_sums`. Raises ValueError, TypeError or AttributeError for other bytes."""
    values = json.loads(bytes(payload))
    return {str(name): (int(nbytes), int(digest)) for name, (nbytes, digest) in values.items()}


def chain(
    held: Mapping[Generation, Collection[str]], last: Generation, shard: str
) -> list[Generation]:
    """Return the generations that produce part ``shard`` of ``last``, from the base on.

    ``held``: generation -> parts. Empty when no unbroken chain exists.
    """
    gradients, found, wanted = records.gradients_part(shard), [last], last
    while shard not in held.get(wanted, ()):
        if not {gradients, UPDATE_PART, SUMS_PART} <= set(held.get(wanted, ())):
            return []
        before = predecessor(held, wanted)
        if before is None:
            return []
        found.append(before)
        wanted = before
    return found[::-1]


def predecessor(held: Collection[Generation], generation: Generation) -> Generation | None:
    """Return the generation of the previous iteration, in the lineage that led here."""
    before = generation.iteration - 1
    return max((g for g in held if g.iteration == before and g < generation), default=None)


def key(generation: Generation, name: str) -> str:
    """Return the name under which a member gets a part of another generation than the restored."""
    return f"{generation.lineage}.{generation.iteration}/{name}"


def from_key(text: str) -> tuple[Generation, str] | None:
    """Invert :func:`key`; None for the bare name of a part."""
    match = re.fullmatch(r"(\d+)\.(\d+)/(.*)", text)
    return match and (Generation(int(match[1]), int(match[2])), match[3])


def suspects(recipe: records.Recipe, restored: Generation, part: str) -> Iterator[BadPart]:
    """Yield the sealed bytes that must not be used again, because a replay failed on ``part``.

    These are all places of the part. For :data:`REPLAY` they are all copies of the checksums of the
    restored generation: without these no chain to it is tried again.
    """
    replay = recipe.replay
    if replay is None:
        return
    place = (restored, SUMS_PART) if part == REPLAY else from_key(part)
    if place is not None:
        found: tuple[records.Source, ...] = replay.sources.get(place[0], {}).get(place[1], ())
        for source in found:
            yield BadPart(source.node, source.role, *place)


class ChainIndex:
    """Chains that lead to shard parts without a whole copy.

    ``generations``: those of which usable parts exist.
    """

    def __init__(self, generations: Iterable[Generation], copies: records.WholeCopies) -> None:
        self._generations = generations
        self._copies = copies

    def extend(
        self,
        recipe: records.Recipe,
        layout: records.RoleLayout,
        names: Collection[str],
        generation: Generation,
    ) -> records.Recipe:
        """Return the recipe with the chain that recomputes all parts ``names``.

        The recipe is unchanged when a chain is broken, or when the chains of the parts start from
        different generations: parts that are sent whole are sent together.
        """
        if not names or not layout.step_parts:
            return recipe
        wanted = [*names, *map(records.gradients_part, names), UPDATE_PART, SUMS_PART]
        held: dict[Generation, Mapping[str, tuple[records.Source, ...]]] = {
            earlier: {n: found for n in wanted if (found := self._copies(layout.role, n, earlier))}
            for earlier in self._generations
            if earlier <= generation
        }
        chains = {tuple(chain(held, generation, shard)) for shard in names}
        if len(chains) != 1 or not (only := chains.pop()):
            return recipe
        base, *steps = only
        needed = {base: [*names], **dict.fromkeys(steps, wanted[len(names) :])}
        sources = {g: {name: held[g][name] for name in parts} for g, parts in needed.items()}
        return replace(recipe, replay=records.Replay(base, tuple(steps), sources))

    def alternatives(self, role: int, part: str, generation: Generation) -> list[records.Recipe]:
        """Return no recipe: a chain produces all parts of a role together."""
        return []
