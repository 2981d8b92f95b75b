"""The contents of the files of a dump: which parts they hold, from which sources other parts can be
rebuilt, and whether a generation is complete.

The files may come from any number of nodes and failures. Checksums are compared only when parts are
loaded.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

from deadpool_megatron.layout import records
from deadpool_megatron.layout.descriptions import difference
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.planner import PartIndex, RestoreQuery, is_kept
from deadpool_megatron.layout.records import Generation, Holding, Inventory, Restore, RoleLayout
from deadpool_megatron.vault.disk.dump import dump_files
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.shm.segment import PartState, Segment

NONE_KNOWN: Mapping[int, RoleLayout] = {}
_NAME = re.compile(r"(\d+)-(\d+)")


def dumped_parts(
    directory: Path,
    generation: Generation,
    roles: Collection[int],
    layouts: Mapping[int, RoleLayout] = NONE_KNOWN,
) -> PartIndex:
    """Return an index of the parts that the files of a dump can give. The rules for parts in memory
    apply, as if the files were the inventories of live nodes.

    In the run that wrote the files, the parts may have had other lineages; here all have that of
    ``generation``. ``layouts``: the known layouts of roles; others are read from the files.
    """
    holdings = defaultdict[int, list[Holding]](list)
    described = defaultdict[int, list[RoleLayout]](list)
    for dumped in dump_files(directory):
        node, role = node_of(dumped), dumped.layout.role
        described[node].append(dumped.layout)
        if parts := _sealed(dumped, generation.iteration):
            holdings[node].append(Holding(role, generation, frozenset(parts)))
    found = {
        node: Inventory(node, 0, tuple(holdings[node]), tuple(known))
        for node, known in described.items()
    }
    kept = {generation.lineage: NO_LIMIT}
    return PartIndex(RestoreQuery(0, roles, found, {}, {}, kept, layouts))


def node_of(dumped: Segment) -> int:
    """Return the number of the node that wrote a dump file."""
    return int(dumped.path.stem.rsplit("-", 1)[1])


def snapshot_of_dump(directory: Path, role: int, generation: Generation, boundary: str) -> Snapshot:
    """Return the place of each byte of a role in the files of a dump, for its export.

    Reads descriptions and headers only. Raises VaultError for a part without bytes, which could
    only be decoded from parity blocks.
    """
    files = [file for file in dump_files(directory, role) if file.generation(0) == generation]
    if not files:
        raise VaultError(f"there is nothing of role {role} in {directory}")
    layout = files[0].layout
    infos = {part.name: part for part in layout.parts}
    parts: dict[str, tuple[int, int, int]] = {}
    elsewhere: dict[str, str] = {}
    for name in (*layout.shard_parts, records.extras_part(boundary)):
        found = [file for file in files if file.layout.layout_hash == layout.layout_hash]
        for other in sorted(set(infos[name].replicas) - {role}):
            others = dump_files(directory, other)
            found += (file for file in others if file.layout.has(infos[name]))
        held = next((file for file in found if holds(file, name, generation.iteration)), None)
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


def dump_difference(directory: Path, layout: RoleLayout) -> str:
    """Return how the model in a role's files differs from its ``layout``; empty where it does not,
    or no file can be read now."""
    # Memory or descriptors are short: the vault waits until it can read the files.
    with contextlib.suppress(OSError):
        held = [dumped.layout for dumped in dump_files(directory, layout.role)]
        if held and all(dumped.layout_hash != layout.layout_hash for dumped in held):
            return difference(held[0], layout)
    return ""


def holds(dumped: Segment, part: str, iteration: int) -> bool:
    """Return whether a file has the sealed part of this iteration."""
    return part in _sealed(dumped, iteration)


def newest_whole(
    base: Path, roles: Collection[int], kept: Mapping[int, int]
) -> tuple[Restore | None, list[str]]:
    """Return the newest whole generation in the directories below ``base``, if any, and the reasons
    why newer generations are not whole.

    A generation is whole if the files have every role's parts, or the blocks to decode them.
    ``kept``: the kept lineages (layout.planner.keep_lineages); generations of other lineages were
    abandoned, and do not count. Checksums are compared when the parts are loaded.
    """
    refusals: list[str] = []
    found = []
    for directory in base.iterdir() if base.is_dir() else ():
        match = _NAME.fullmatch(directory.name)
        if match is not None and directory.is_dir():
            found.append((Generation(int(match[1]), int(match[2])), directory))
    for generation, directory in sorted(found, reverse=True):
        if not is_kept(kept, generation):
            continue
        boundary, missing = last_boundary(directory, generation, roles)
        if boundary is not None:
            return Restore("dump", generation, boundary, str(directory)), refusals
        refusals.append(f"generation {generation.lineage}:{generation.iteration} lacks {missing}")
    return None, refusals


def last_boundary(
    directory: Path, generation: Generation, roles: Collection[int]
) -> tuple[str | None, str]:
    """Return the last boundary that all roles reached in this dump, or None and what is missing."""
    found = dumped_parts(directory, generation, roles).produce(generation)
    return (None, found) if isinstance(found, str) else (found.boundary, "")


def _sealed(dumped: Segment, iteration: int) -> set[str]:
    """Return the names of the sealed parts in a file; none if it is of another iteration."""
    if dumped.generation(0).iteration != iteration:
        return set()
    entries = dumped.entries(0).items()
    return {name for name, entry in entries if entry.state is PartState.SEALED}
