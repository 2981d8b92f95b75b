"""What vaults hold, asked for and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from deadpool_megatron.layout.planner import RestoreQuery, choose_restore
from deadpool_megatron.layout.records import (
    Generation,
    Holding,
    Inventory,
    Restore,
    RoleLayout,
    Source,
)

# Node -> roles, generations and names of parts.
Content = Mapping[int, Iterable[tuple[int, Generation, frozenset[str]]]]


def inventories(content: Content, layout: Callable[[int], RoleLayout]) -> dict[int, Inventory]:
    return {
        node: Inventory(
            node,
            1,
            tuple(Holding(*one) for one in held),
            tuple(map(layout, sorted({role for role, _, _ in held}))),
        )
        for node, held in ((node, list(held)) for node, held in content.items())
    }


def holders(content: Content, role: int, generation: Generation, part: str) -> set[Source]:
    """Where a part lies."""
    return {
        Source(node, role)
        for node, held in content.items()
        for r, found, parts in held
        if (r, found) == (role, generation) and part in parts
    }


def chosen(query: RestoreQuery) -> Restore:
    answer = choose_restore(query)
    assert isinstance(answer, Restore), answer
    return answer
