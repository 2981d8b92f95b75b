"""The layout of a role's generations, from its parts: the contents of a slot, and its replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from deadpool_megatron.layout import records
from deadpool_megatron.layout.ranks import first_role
from deadpool_megatron.layout.records import PartInfo, RoleLayout
from deadpool_megatron.layout.shard_map import ShardMap
from deadpool_megatron.state.parts import Part


def role_layout(
    role: int,
    parts: Sequence[Part],
    extras_capacity_bytes: int,
    peers: Sequence[int],
    slots: int,
    meaning: str,
) -> RoleLayout:
    """Return the layout of a role's generations. Frameworks know ranks: replicas of parts and
    ``peers`` are ranks, and become roles of the size of ``role`` here.

    ``meaning``: see :meth:`Framework.meaning`. ``extras_capacity_bytes``: for the extras at each
    boundary. It is not in the hash, so that a run can continue with another capacity.
    """
    first = first_role(role)
    infos = [
        PartInfo(p.name, p.nbytes, tuple(first + rank for rank in p.replicas), p.signature())
        for p in parts
    ]
    digest = hashlib.sha256(meaning.encode())
    for info in infos:
        digest.update(f"{info.name}|{info.nbytes}|{info.identity};".encode())
    is_divisible = not any(part.indivisible for part in parts)
    shard_map = (
        ShardMap.of({part.name: part.runs for part in parts}) if is_divisible else ShardMap()
    )
    names = map(records.extras_part, records.BOUNDARIES)
    extras = [PartInfo(name, extras_capacity_bytes, (role,)) for name in names]
    return RoleLayout(
        role=role,
        parts=(*infos, *extras),
        peers=tuple(sorted(first + rank for rank in peers)),
        slots=slots,
        layout_hash=digest.hexdigest(),
        meaning=meaning,
        shard_map=shard_map,
    )
