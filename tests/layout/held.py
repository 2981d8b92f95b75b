"""What vaults hold, asked for and counted."""

from collections.abc import Callable, Iterable, Mapping

from deadpool_megatron.layout import planner, records

# Node -> roles, generations and names of parts.
Content = Mapping[int, Iterable[tuple[int, records.Generation, frozenset[str]]]]


def inventories(
    content: Content, layout: Callable[[int], records.RoleLayout]
) -> dict[int, records.Inventory]:
    return {
        node: records.Inventory(
            node,
            1,
            tuple(records.Holding(*one) for one in held),
            tuple(map(layout, sorted({role for role, _, _ in held}))),
        )
        for node, held in ((node, list(held)) for node, held in content.items())
    }


def holders(
    content: Content, role: int, generation: records.Generation, part: str
) -> set[records.Source]:
    """Where a part lies."""
    return {
        records.Source(node, role)
        for node, held in content.items()
        for r, found, parts in held
        if (r, found) == (role, generation) and part in parts
    }


def chosen(query: planner.RestoreQuery) -> records.Restore:
    answer = planner.choose_restore(query)
    assert isinstance(answer, records.Restore), answer
    return answer
