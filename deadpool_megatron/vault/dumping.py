"""Generations on disk: what vaults write when a run has to end, in the format of the slots.

``dump-<role>-<node>.seg`` is a segment with one slot that holds the parts which the vault of that
node could give; files of several nodes complete each other.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from deadpool_megatron.layout.records import Generation, RoleLayout, extras_part
from deadpool_megatron.vault.errors import NoRoom, SegmentError, VaultError
from deadpool_megatron.vault.limits import free_bytes
from deadpool_megatron.vault.segment import Segment, SlotState, checksum, dump_name
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.table import Place

log = logging.getLogger(__name__)


def dump_files(directory: Path, role: int) -> Iterator[Segment]:
    """The readable dump files of a role, in order of the node that wrote them."""
    for path in sorted(directory.glob(f"dump-{role}-*.seg")):
        try:
            dumped = Segment.open(path, writable=False)
        except (SegmentError, OSError) as error:
            log.warning("dump: %s", error)
            continue
        if dumped.state(0) is SlotState.SEALED:
            yield dumped


def dump(
    state: VaultState,
    directory: Path,
    generation: Generation,
    boundary: str | None,
    roles: Iterable[int] | None,
) -> list[str]:
    """Write what this node holds of a generation, one file for each role; answers the paths.
    ``boundary``: the one whose extras are written, None for all of them.

    A part is written only if its bytes match its checksum. A file appears whole or not at all.
    Raises VaultError with one line when it cannot be written; what was there before still is.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with state.lock:
        held = {h.role for h in state.table.holdings() if h.generation == generation}
    written = []
    for role in sorted(held if roles is None else held & set(roles)):
        path = _dump_role(state, directory, role, generation, boundary)
        if path is not None:
            written.append(str(path))
    return written


def generation_name(generation: Generation) -> str:
    """Name of the directory with the dump files of a generation."""
    return f"{generation.lineage}-{generation.iteration}"


def dump_held(state: VaultState, base: Path, generations: Iterable[Generation]) -> list[str]:
    """Write everything this node holds of these generations, the newest first, to directories
    below ``base``; answers the paths. Raises VaultError, having written what had room.
    """
    written: list[str] = []
    for generation in sorted(generations, reverse=True):
        try:
            written += dump(state, base / generation_name(generation), generation, None, None)
        except (VaultError, OSError) as error:
            raise VaultError(f"{error}; {len(written)} files were written before") from error
    return written


def _dump_role(
    state: VaultState, directory: Path, role: int, generation: Generation, boundary: str | None
) -> Path | None:
    with state.lock:
        layout = state.table.layout(role)
        found: dict[str, list[Place]] = {}
        if layout is not None:
            names = tuple(part.name for part in layout.parts)
            if boundary is not None:
                names = (*layout.shard_parts, extras_part(boundary))
            found = {name: state.table.find(role, generation, name) for name in names}
            for place in (place for places in found.values() for place in places):
                state.table.pin(place)
    if layout is None:
        return None
    path = directory / dump_name(role, state.node)
    try:
        good = {name: _intact(state, places) for name, places in found.items()}
        kept = {name: place for name, place in good.items() if place is not None}
        if kept:
            _write_dump(path, layout, generation, kept, state.settings.chunk_bytes)
    finally:
        with state.lock:
            for place in (place for places in found.values() for place in places):
                state.table.unpin(place)
    return path if kept else None


def _intact(state: VaultState, places: list[Place]) -> Place | None:
    for place in places:
        digest = checksum(place.view)
        if digest == place.checksum:
            return place
        state.mark_bad(place, digest)
    return None


def _write_dump(
    path: Path,
    layout: RoleLayout,
    generation: Generation,
    places: dict[str, Place],
    chunk_bytes: int,
) -> None:
    single = dataclasses.replace(layout, slots=1)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        dumped = Segment.create(unfinished, single, None, tuple(places))
        dumped.open_slot(0, generation, generation.lineage)
        for name, place in places.items():
            view = place.view
            for start in range(0, len(view), chunk_bytes):
                dumped.write_from(0, name, start, view[start : start + chunk_bytes])
            dumped.seal_part(0, name, place.nbytes, place.checksum, generation.lineage)
        dumped.flush()
        unfinished.rename(path)
    except (NoRoom, OSError) as error:
        unfinished.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or "no room"
        needed, free = sum(place.nbytes for place in places.values()), free_bytes(path.parent)
        raise VaultError(
            f"{path} cannot be written ({why}): {needed} bytes needed, {free} free"
        ) from error
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
