"""The layout of a role's generations, from its parts: what a slot has room for, and for whom."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from deadpool_megatron.layout.records import (
    BOUNDARIES,
    PartInfo,
    RoleLayout,
    extras_part,
    gradients_part,
)
from deadpool_megatron.state.parts import Part


def role_layout(
    role: int,
    parts: Sequence[Part],
    extras_room_bytes: int,
    peers: Sequence[int],
    slots: int,
    meaning: str,
    step_parts: Sequence[PartInfo] = (),
) -> RoleLayout:
    """The layout of a role's generations. ``extras_room_bytes``: at each boundary; no part of the
    hash, so that a run continues with other room. ``step_parts``: for the updates that lead to each
    generation, where they are kept.
    """
    identities = {part.name: part.signature() for part in parts}
    # The gradients of a part are those of the same parameters.
    identities |= {gradients_part(name): identity for name, identity in identities.items()}
    found = [*(PartInfo(part.name, part.nbytes, part.replicas) for part in parts), *step_parts]
    infos = [replace(info, identity=identities.get(info.name, "")) for info in found]
    digest = hashlib.sha256(meaning.encode())
    for info in infos:
        digest.update(f"{info.name}|{info.nbytes}|{info.identity};".encode())
    return RoleLayout(
        role=role,
        parts=(
            *infos,
            *(
                PartInfo(extras_part(boundary), extras_room_bytes, (role,))
                for boundary in BOUNDARIES
            ),
        ),
        peers=tuple(sorted(peers)),
        slots=slots,
        layout_hash=digest.hexdigest(),
        meaning=meaning,
    )
