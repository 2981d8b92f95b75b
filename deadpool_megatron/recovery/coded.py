"""Which shard parts can be computed from coded blocks: parity in vaults, and its group. Pure.

Looked at only for parts of which no whole copy is left, so a loss costs what was lost, not what the
run consists of. The layouts of parity roles stand in the inventories and say all there is to know:
the group, how many blocks it has, and which of them this one is (layout/places/parity.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from deadpool_megatron.layout.decision import BadPart
from deadpool_megatron.layout.places.parity import MEMBERS, combines, is_parity_role, parity_numbers
from deadpool_megatron.layout.records import (
    Decoding,
    Generation,
    Inventory,
    RoleLayout,
    Source,
)

# Role, part, generation -> places of whole copies, best first.
WholeCopies = Callable[[int, str, Generation], tuple[Source, ...]]


@dataclass
class _Composition:
    """One way in which roles were grouped; ``blocks``: number from k on -> parity roles, of which
    plans that came to the same group have one each.
    """

    group: tuple[int, ...]
    parities: int
    blocks: dict[int, list[int]] = field(default_factory=dict)


class CodedShelf:
    """All parity blocks in the inventories of live nodes."""

    def __init__(
        self,
        inventories: Iterable[Inventory],
        layouts: Mapping[int, RoleLayout],
        bad_parts: frozenset[BadPart],
        copies: WholeCopies,
    ) -> None:
        self._inventories = tuple(inventories)
        self._layouts = layouts
        self._bad_parts = bad_parts
        self._copies = copies
        self._of_role: dict[int, list[_Composition]] | None = None
        self._held: dict[tuple[int, Generation], list[tuple[int, frozenset[str]]]] = {}

    def decoding(self, role: int, part: str, generation: Generation) -> Decoding | None:
        """All blocks that are left of one group of ``role``, if they are enough.

        Groups of several epochs may be held: the one with the most blocks, since each that is
        left over can stand in for one that turns out to be damaged.
        """
        if self._of_role is None:
            self._of_role = self._index()
        found = [
            Decoding(one.group, one.parities, blocks)
            for one in self._of_role.get(role, ())
            if len(blocks := self._blocks(one, role, part, generation)) >= len(one.group)
        ]
        return max(found, key=lambda one: (len(one.blocks), one.group), default=None)

    def _index(self) -> dict[int, list[_Composition]]:
        compositions: dict[tuple[tuple[int, ...], int, tuple[str, ...]], _Composition] = {}
        hashes: dict[int, str] = {}
        for inventory in self._inventories:
            for layout in inventory.layouts:
                if not is_parity_role(layout.role) or layout.role in hashes:
                    continue
                if not combines(layout, self._layouts):
                    continue
                hashes[layout.role] = layout.layout_hash
                number, parities = parity_numbers(layout)
                key = (layout.peers, parities, tuple(part.name for part in layout.parts))
                one = compositions.setdefault(key, _Composition(layout.peers, parities))
                one.blocks.setdefault(len(layout.peers) + number, []).append(layout.role)
            same = {x.role for x in inventory.layouts if hashes.get(x.role) == x.layout_hash}
            for holding in inventory.holdings:
                if holding.role in same and MEMBERS in holding.parts:
                    place = (inventory.node, holding.parts)
                    self._held.setdefault((holding.role, holding.generation), []).append(place)
        of_role: dict[int, list[_Composition]] = {}
        for one in compositions.values():
            for role in one.group:
                of_role.setdefault(role, []).append(one)
        return of_role

    def _blocks(
        self, one: _Composition, wanted: int, part: str, generation: Generation
    ) -> dict[int, tuple[Source, ...]]:
        blocks = {}
        for number, role in enumerate(one.group):
            found = () if role == wanted else self._copies(role, part, generation)
            if found or not self._has(role, part):
                blocks[number] = found
        for number, roles in sorted(one.blocks.items()):
            if found := tuple(s for role in roles for s in self._parity(role, part, generation)):
                blocks[number] = found
        return blocks

    def _has(self, role: int, part: str) -> bool:
        """Whether a role has such a part at all; one of which nothing is known may have it."""
        layout = self._layouts.get(role)
        return layout is None or part in layout.shard_parts

    def _parity(self, role: int, part: str, generation: Generation) -> tuple[Source, ...]:
        """Nodes that hold a block and what says which bytes it was computed from, both intact."""
        bad = self._bad_parts
        return tuple(
            Source(node, role)
            for node, held in self._held.get((role, generation), ())
            if part in held
            and not any(BadPart(node, role, generation, name) in bad for name in (part, MEMBERS))
        )
