"""The parts that the files of a dump hold, and chains of them to make others of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from deadpool_megatron.layout.meanings import difference
from deadpool_megatron.layout.part_kinds import SUMS_PART, UPDATE_PART, extras_part, gradients_part
from deadpool_megatron.layout.records import (
    Generation,
    RoleLayout,
)
from deadpool_megatron.layout.replaying import chain
from deadpool_megatron.vault.disk.dump import dump_files
from deadpool_megatron.vault.disk.taken import Taken
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState


def dumped_parts(directory: Path, role: int, generation: Generation) -> dict[Generation, set[str]]:
    """Generation -> parts that the files of a role hold, up to the iteration of ``generation``.

    The run that wrote them gave them other lineages; all have that of ``generation`` here.
    """
    found: dict[Generation, set[str]] = {}
    for dumped in dump_files(directory, role):
        for slot, one in slots_of(dumped, generation):
            sealed = {
                part.name
                for part in dumped.layout.parts
                if dumped.entry(slot, part.name).state is PartState.SEALED
            }
            found.setdefault(one, set()).update(sealed)
    return found


def taken_of_dump(directory: Path, role: int, generation: Generation, boundary: str) -> Taken:
    """Where each byte of a role lies in the files of a dump, for an export of it.

    Reads descriptions and headers only. Raises VaultError for a part of which there are no bytes,
    but parity blocks or gradients to compute them from.
    """
    files = [one for one in dump_files(directory, role) if one.generation(0) == generation]
    if not files:
        raise VaultError(f"there is nothing of role {role} in {directory}")
    layout = files[0].layout
    infos = {part.name: part for part in layout.parts}
    parts: dict[str, tuple[int, int, int]] = {}
    elsewhere: dict[str, str] = {}
    for name in (*layout.shard_parts, extras_part(boundary)):
        found = [one for one in files if one.layout.layout_hash == layout.layout_hash]
        for other in sorted(set(infos[name].replicas) - {role}):
            others = dump_files(directory, other)
            found += (one for one in others if one.layout.has(infos[name]))
        held = next((one for one in found if holds(one, name, generation.iteration)), None)
        if held is None:
            raise VaultError(
                f"part {name} of role {role} does not lie in {directory} as bytes: a run that goes"
                " on from there computes it"
            )
        entry = held.entry(0, name)
        parts[name] = (held.offset(0, name), entry.nbytes, entry.checksum)
        if held.path != files[0].path:
            elsewhere[name] = str(held.path)
    path = str(files[0].path)
    return Taken(role, layout.layout_hash, generation, boundary, path, parts, elsewhere)


def dump_differs(directory: Path, layout: RoleLayout) -> str:
    """In what the files of a role are of another model than its ``layout``; empty where they are
    not, or none can be read now."""
    with contextlib.suppress(OSError):  # a shortage: the vault waits until it can read them
        held = [one.layout for one in dump_files(directory, layout.role)]
        if held and all(one.layout_hash != layout.layout_hash for one in held):
            return difference(held[0], layout)
    return ""


def slots_of(dumped: Segment, generation: Generation) -> Iterator[tuple[int, Generation]]:
    """The slots of a dump file with the lineage of ``generation``; none of another iteration's."""
    if dumped.generation(0).iteration != generation.iteration:
        return
    for slot in range(dumped.slots):
        if dumped.state(slot) is SlotState.SEALED:
            yield slot, Generation(generation.lineage, dumped.generation(slot).iteration)


def recomputed_from(
    held: dict[Generation, set[str]], generation: Generation, layout: RoleLayout
) -> dict[str, list[tuple[Generation, str]]]:
    """Shard parts that the files of a dump hold as chains only -> what leads to each."""
    found: dict[str, list[tuple[Generation, str]]] = {}
    for shard in layout.shard_parts:
        line = chain(held, generation, shard)
        if len(line) > 1:
            steps = (gradients_part(shard), UPDATE_PART, SUMS_PART)
            found[shard] = [(line[0], shard), *((g, name) for g in line[1:] for name in steps)]
    return found


def holds(dumped: Segment, part: str, iteration: int) -> bool:
    """True when a file has the part, sealed, of this iteration."""
    names = {one.name for one in dumped.layout.parts}
    return (
        part in names
        and dumped.generation(0).iteration == iteration
        and dumped.entry(0, part).state is PartState.SEALED
    )
