"""What a role's generations consist of, as its member describes it to the vaults."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from deadpool_megatron.layout.records import BOUNDARIES, PartInfo, RoleLayout, extras_part
from deadpool_megatron.state.packing import Part

# Room for extras to grow after start: longer counters, sums of auxiliary losses that appear later.
_EXTRAS_SLACK = 1.5
_EXTRAS_STEP_BYTES = 64 << 10


def role_layout(
    role: int,
    parts: list[Part],
    extras_bytes: int,
    peers: list[int],
    slots: int,
    stage_class: str,
    step_parts: Sequence[PartInfo] = (),
) -> RoleLayout:
    """The layout of a role's generations; extras get room to grow. ``step_parts``: for the updates
    that lead to each generation, where they are kept (see :mod:`.steps`).
    """
    wanted = int(extras_bytes * _EXTRAS_SLACK) + _EXTRAS_STEP_BYTES
    capacity = -(-wanted // _EXTRAS_STEP_BYTES) * _EXTRAS_STEP_BYTES
    digest = hashlib.sha256("".join(part.signature() for part in parts).encode())
    for info in step_parts:
        digest.update(f"{info.name}|{info.nbytes};".encode())
    return RoleLayout(
        role=role,
        parts=(
            *(PartInfo(part.name, part.nbytes, part.replicas) for part in parts),
            *step_parts,
            *(PartInfo(extras_part(boundary), capacity, (role,)) for boundary in BOUNDARIES),
        ),
        peers=tuple(sorted(peers)),
        slots=slots,
        layout_hash=digest.hexdigest(),
        stage_class=stage_class,
    )
