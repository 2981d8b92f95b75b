"""Which generation can be put together from dump files, of however many nodes and failures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from deadpool_megatron.layout.part_kinds import BOUNDARIES, extras_part
from deadpool_megatron.layout.planner import is_kept
from deadpool_megatron.layout.records import Generation, Restore, RoleLayout
from deadpool_megatron.vault.disk.dump import dump_files
from deadpool_megatron.vault.disk.dump_contents import dumped_parts, recomputed_from
from deadpool_megatron.vault.shm.segment import PartState

_NAME = re.compile(r"(\d+)-(\d+)")


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
        for layout, names in _files(directory, role):
            known = layouts.setdefault(role, layout)
            if known.layout_hash != layout.layout_hash:
                return None, f"one layout for role {role}: its files have two"
            parts.setdefault(role, set()).update(names)
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
    from deadpool_megatron.vault.disk.dumped_blocks import dumped_decodings  # most have no blocks

    return bool(dumped_decodings(directory, role, part, iteration))


def _files(directory: Path, role: int) -> Iterator[tuple[RoleLayout, set[str]]]:
    for dumped in dump_files(directory, role):
        layout = dumped.layout
        entries = {part.name: dumped.entry(0, part.name) for part in layout.parts}
        yield layout, {n for n, entry in entries.items() if entry.state is PartState.SEALED}
