"""Inventories on the wire: the same facts as Inventory.to_dict, in a fraction of the text. Pure.

After a loss every node sends one at the same moment, and the decision waits for the last of them to
be read. Names of parts stand once; regular lists of roles are written as [first, last, step].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deadpool_megatron.layout.meanings import SEPARATOR
from deadpool_megatron.layout.records import Generation, Holding, Inventory, PartInfo, RoleLayout

_VERSION = 3
_WORTH_A_RANGE = 4


def pack_inventory(inventory: Inventory) -> dict[str, Any]:
    """JSON form. ``sets``: lists of part names; a holding is [role, lineage, iteration, number of
    its set]; a layout is [role, hash, slots, meaning, peers, parts], a part [name, bytes, replicas,
    identity], where null stands for the role alone. A meaning is a list of numbers of ``facts``,
    most of which are those of all roles.
    """
    sets: dict[frozenset[str], int] = {}
    facts: dict[str, int] = {}
    holdings = [
        [h.role, h.generation.lineage, h.generation.iteration, sets.setdefault(h.parts, len(sets))]
        for h in inventory.holdings
    ]
    return {
        "version": _VERSION,
        "node": inventory.node,
        "epoch": inventory.epoch,
        "sets": [sorted(names) for names in sets],
        "holdings": holdings,
        "layouts": [_pack_layout(layout, facts) for layout in inventory.layouts],
        "facts": list(facts),
    }


def unpack_inventory(
    values: Mapping[str, Any], known: Mapping[int, RoleLayout] | None = None
) -> Inventory:
    """Inverse of :func:`pack_inventory`. ``known``: layouts by role, taken where the hash is equal.

    Raises KeyError, TypeError or ValueError for anything else.
    """
    if values["version"] != _VERSION:
        raise ValueError(f"inventory of version {values['version']}, known is {_VERSION}")
    sets = {n: frozenset(str(name) for name in names) for n, names in enumerate(values["sets"])}
    return Inventory(
        int(values["node"]),
        int(values["epoch"]),
        tuple(
            Holding(int(role), Generation(int(lineage), int(iteration)), sets[number])
            for role, lineage, iteration, number in values["holdings"]
        ),
        tuple(_unpack_layout(one, values["facts"], known or {}) for one in values["layouts"]),
    )


def _pack_layout(layout: RoleLayout, facts: dict[str, int]) -> list[Any]:
    own = (layout.role,)
    parts = [
        [p.name, p.nbytes, None if p.replicas == own else _pack_roles(p.replicas), p.identity]
        for p in layout.parts
    ]
    peers = _pack_roles(layout.peers)
    meaning = [facts.setdefault(fact, len(facts)) for fact in layout.meaning.split(SEPARATOR)]
    return [layout.role, layout.layout_hash, layout.slots, meaning, peers, parts]


def _unpack_layout(
    values: Sequence[Any], facts: Sequence[str], known: Mapping[int, RoleLayout]
) -> RoleLayout:
    role, layout_hash, slots, meaning, peers, parts = values
    same = known.get(role)
    if same is not None and same.layout_hash == layout_hash:
        return same
    return RoleLayout(
        role=int(role),
        parts=tuple(
            PartInfo(
                str(name),
                int(nbytes),
                (int(role),) if replicas is None else _unpack_roles(replicas),
                str(identity),
            )
            for name, nbytes, replicas, identity in parts
        ),
        peers=_unpack_roles(peers),
        slots=int(slots),
        layout_hash=str(layout_hash),
        meaning=SEPARATOR.join(str(facts[number]) for number in meaning),
    )


def _pack_roles(roles: tuple[int, ...]) -> list[int] | dict[str, list[int]]:
    if len(roles) >= _WORTH_A_RANGE:
        step = roles[1] - roles[0]
        if step > 0 and roles == tuple(range(roles[0], roles[-1] + 1, step)):
            return {"range": [roles[0], roles[-1], step]}
    return list(roles)


def _unpack_roles(values: Any) -> tuple[int, ...]:
    if isinstance(values, Mapping):
        first, last, step = values["range"]
        return tuple(range(int(first), int(last) + 1, int(step)))
    return tuple(int(role) for role in values)


def usual_layouts(roles: set[int], inventories: Iterable[Inventory]) -> dict[int, RoleLayout]:
    """The layout of each role that most nodes name; layouts of copies travel with the copies."""
    found: dict[int, list[RoleLayout]] = {}
    if roles:
        for layout in (layout for inventory in inventories for layout in inventory.layouts):
            if layout.role in roles:
                found.setdefault(layout.role, []).append(layout)
    return {role: _most_named(layouts) for role, layouts in found.items()}


def _most_named(layouts: list[RoleLayout]) -> RoleLayout:
    counts = Counter(layout.layout_hash for layout in layouts)
    return max(layouts, key=lambda one: (counts[one.layout_hash], one.layout_hash))
