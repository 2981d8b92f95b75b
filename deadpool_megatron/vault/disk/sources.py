"""The content of a dump's files: whole parts, chains to make others of, and whether that is all.

Of however many nodes and failures they are. Checksums are compared when parts are loaded.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from deadpool_megatron.layout.planner import is_kept
from deadpool_megatron.layout.records import (
    BOUNDARIES,
    SUMS_PART,
    UPDATE_PART,
    Generation,
    Restore,
    RoleLayout,
    extras_part,
    gradients_part,
)
from deadpool_megatron.layout.replaying import chain
from deadpool_megatron.layout.words import difference
from deadpool_megatron.vault.disk.dump import dump_files
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState

_NAME = re.compile(r"(\d+)-(\d+)")


def dumped_parts(directory: Path, role: int, generation: Generation) -> dict[Generation, set[str]]:
    """Generation -> parts that the files of a role hold, up to the iteration of ``generation``.

    The run that wrote them gave them other lineages; all have that of ``generation`` here.
    """
    found: dict[Generation, set[str]] = {}
    for dumped in dump_files(directory, role):
        for slot, one in slots_of(dumped, generation):
            found.setdefault(one, set()).update(_sealed(dumped, slot))
    return found


def snapshot_of_dump(directory: Path, role: int, generation: Generation, boundary: str) -> Snapshot:
    """Return where each byte of a role lies in the files of a dump, for an export of it.

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
                f"part {name} of role {role} is not in {directory} as bytes: a run that"
                " continues from there computes it"
            )
        entry = held.entry(0, name)
        parts[name] = (held.offset(0, name), entry.nbytes, entry.checksum)
        if held.path != files[0].path:
            elsewhere[name] = str(held.path)
    path = str(files[0].path)
    return Snapshot(role, layout.layout_hash, generation, boundary, path, parts, elsewhere)


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


def holds(dumped: Segment, part: str, iteration: int) -> bool:
    """True when a file has the part, sealed, of this iteration."""
    return dumped.generation(0).iteration == iteration and part in _sealed(dumped, 0)


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


def newest_whole(
    base: Path, world_size: int, kept: Mapping[int, int]
) -> tuple[Restore | None, list[str]]:
    """The newest generation below ``base`` of which every role's parts are there, or what they are
    decoded or recomputed from; and why newer ones are not whole. ``kept``: the line of descent, see
    layout.planner.keep_line; what was abandoned does not count. Checksums are compared when the
    parts are loaded.
    """
    refusals: list[str] = []
    for generation, directory in dumped_generations(base):
        if not is_kept(kept, generation):
            continue
        boundary, lacking = last_boundary(directory, generation, world_size)
        if boundary is not None:
            return Restore("dump", generation, boundary, str(directory)), refusals
        refusals.append(f"generation {generation.lineage}:{generation.iteration} lacks {lacking}")
    return None, refusals


def dumped_generations(base: Path) -> list[tuple[Generation, Path]]:
    """The directories of generations below ``base``, the newest first."""
    found = []
    for directory in base.iterdir() if base.is_dir() else ():
        match = _NAME.fullmatch(directory.name)
        if match is not None and directory.is_dir():
            found.append((Generation(int(match[1]), int(match[2])), directory))
    return sorted(found, reverse=True)


def last_boundary(
    directory: Path, generation: Generation, world_size: int
) -> tuple[str | None, str]:
    """The last boundary that all roles have reached in this dump, or None and what is missing."""
    iteration = generation.iteration
    layouts: dict[int, RoleLayout] = {}
    parts: dict[int, set[str]] = {}
    for role in range(world_size):
        for dumped in dump_files(directory, role):
            known = layouts.setdefault(role, dumped.layout)
            if known.layout_hash != dumped.layout.layout_hash:
                return None, f"one layout for role {role}: its files have two"
            parts.setdefault(role, set()).update(_sealed(dumped, 0))
        if role not in layouts:
            return None, f"role {role}"
    for role, layout in layouts.items():
        shards = set(layout.shard_parts)
        # What every role recomputes it begins at one whole copy, as in any restore.
        chains = recomputed_from(dumped_parts(directory, role, generation), generation, layout)
        if len({line[0][0] for line in chains.values()}) > 1:
            return None, f"one whole copy of role {role} to recompute all its parts from"
        for part in layout.parts:
            same = [r for r in part.replicas if r in layouts and layouts[r].has(part)]
            held = any(part.name in parts[other] for other in (role, *same))
            if part.name not in shards or held:
                continue
            if part.name in chains or _is_coded(directory, role, part.name, iteration):
                continue
            return None, f"part {part.name} of role {role}"
    lacking = ""
    for boundary in reversed(BOUNDARIES):
        name = extras_part(boundary)
        without = [role for role in layouts if name not in parts[role]]
        if not without:
            return boundary, ""
        lacking = f"part {name} of role {without[0]}"
    return None, lacking


def _is_coded(directory: Path, role: int, part: str, iteration: int) -> bool:
    from deadpool_megatron.vault.schemes.parity_decode import (
        dumped_decodings,  # most have no blocks
    )

    return bool(dumped_decodings(directory, role, part, iteration))


def _sealed(dumped: Segment, slot: int) -> set[str]:
    """Names of the parts that a slot of a file has."""
    names = [part.name for part in dumped.layout.parts]
    return {name for name in names if dumped.entry(slot, name).state is PartState.SEALED}
