"""Which shard parts can be recomputed: a whole copy of an earlier generation and all steps since.

Looked at only for parts of which no whole copy is left. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from deadpool_megatron.layout.part_kinds import SUMS_PART, UPDATE_PART, gradients_part
from deadpool_megatron.layout.records import Generation, Replay, RoleLayout, Source
from deadpool_megatron.layout.replaying import chain, keeps_steps

# Role, part, generation -> places, best first; none for a part that the role does not have.
Places = Callable[[int, str, Generation], tuple[Source, ...]]


class _Chain(NamedTuple):
    base: Generation
    steps: tuple[Generation, ...]


def replay(
    layout: RoleLayout,
    shards: Iterable[str],
    generation: Generation,
    generations: Iterable[Generation],
    places: Places,
) -> Replay | None:
    """How the role of ``layout`` recomputes its parts ``shards`` of ``generation`` together.

    ``generations``: all of which anything usable is held. None when a chain is broken, or when the
    parts would begin from different bases (they never do: what travels whole travels together).
    """
    wanted = list(shards)
    if not wanted or not keeps_steps(layout):
        return None
    role = layout.role
    names = [*wanted, *map(gradients_part, wanted), UPDATE_PART, SUMS_PART]
    earlier = [one for one in generations if one <= generation]
    held: dict[Generation, Mapping[str, tuple[Source, ...]]] = {
        one: {name: found for name in names if (found := places(role, name, one))}
        for one in earlier
    }
    chains = {_as_chain(chain(held, generation, shard)) for shard in wanted}
    if len(chains) != 1 or (only := chains.pop()) is None:
        return None
    needed = {
        only.base: wanted,
        **{one: [*map(gradients_part, wanted), UPDATE_PART, SUMS_PART] for one in only.steps},
    }
    sources = {one: {name: held[one][name] for name in parts} for one, parts in needed.items()}
    return Replay(only.base, only.steps, sources)


def _as_chain(generations: list[Generation]) -> _Chain | None:
    return _Chain(generations[0], tuple(generations[1:])) if generations else None
