"""Rebuilding: how schemes produce shard parts of which no whole copy is left. Pure.

Blocks and steps that were kept under an earlier plan count, too: the inventories decide which
schemes are asked, not the plan of the new epoch. Files of other schemes are not imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from deadpool_megatron.layout import records
from deadpool_megatron.layout.records import Generation, Inventory, Recipe, RoleLayout


class Rebuild(Protocol):
    """Parts that a scheme can produce from the parts that live nodes hold."""

    def extend(
        self, recipe: Recipe, layout: RoleLayout, names: Collection[str], generation: Generation
    ) -> Recipe:
        """Return the recipe with those of the parts ``names`` that this scheme can produce."""

    def alternatives(self, role: int, part: str, generation: Generation) -> list[Recipe]:
        """Return each way to produce one part by itself, the best first."""


def rebuilds_of(
    inventories: Collection[Inventory],
    layouts: Mapping[int, RoleLayout],
    bad_parts: frozenset[records.BadPart],
    generations: Iterable[Generation],
    copies: records.WholeCopies,
) -> list[Rebuild]:
    """Return the schemes of which the inventories hold anything, in the order of preference.

    ``layouts``: those of the run's roles; ``generations``: all of which usable parts are held.
    """
    found: list[Rebuild] = []
    if any(
        records.is_parity_role(kept.role) for inventory in inventories for kept in inventory.layouts
    ):
        from deadpool_megatron.layout.parity_groups import ParityIndex

        found.append(ParityIndex(inventories, layouts, bad_parts, copies))
    if any(layout.step_parts for layout in layouts.values()):
        from deadpool_megatron.layout.gradient_chain import ChainIndex

        found.append(ChainIndex(generations, copies))
    return found


def block_holders(record: records.EpochRecord) -> frozenset[int]:
    """Return the nodes that keep blocks which are computed from the state of several roles."""
    if not record.protection.kind.combines_roles:
        return frozenset()
    from deadpool_megatron.layout.parity_groups import ParityPlacement

    groups = ParityPlacement.of_record(record).groups
    return frozenset(holder for group in groups for holder in group.holders)
