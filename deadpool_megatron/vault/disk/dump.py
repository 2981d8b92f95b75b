"""Generations on disk: files that vaults write when a run has to end, in the format of the slots.

``dump-<role>-<node>.seg`` is a segment whose only slot holds the parts that the vault of that node
could give; files of several nodes complete each other.

With the functions of this module the next agent of a node reads and dumps slots before a vault
opens their directory. For all other facts about slots the control plane asks a vault.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

from deadpool_megatron.file_systems import sync
from deadpool_megatron.layout import records
from deadpool_megatron.layout.planner import is_kept
from deadpool_megatron.layout.records import BadPart, Generation, Inventory, RoleLayout
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.errors import OutOfSpace, SegmentError, VaultError, is_shortage
from deadpool_megatron.vault.memory import free_bytes
from deadpool_megatron.vault.schemes.registry import scheme_of
from deadpool_megatron.vault.shm import segment as segments
from deadpool_megatron.vault.shm.table import Place, Table
from deadpool_megatron.vault.slot_store import SlotStore

log = logging.getLogger(__name__)


def dump_files(directory: Path, role: int | None = None) -> Iterator[segments.Segment]:
    """Yield the readable dump files of a role, in the order of their nodes. Raises OSError when
    descriptors or memory are short, since that proves nothing about a file."""
    for path in sorted(directory.glob(f"dump-{'*' if role is None else role}-*.seg")):
        try:
            dumped = segments.Segment.open(path, writable=False)
        except (SegmentError, OSError) as error:
            if is_shortage(error):
                raise
            log.warning("dump: %s", error)
            continue
        if dumped.state(0) is segments.SlotState.SEALED:
            yield dumped


def dump(
    store: SlotStore, directory: Path, generation: Generation, boundary: str | None
) -> list[str]:
    """Write this node's parts of a generation, one file for each role, and return the paths.
    ``boundary``: only its extras are written; None for all extras.

    A part is written only if its bytes match its checksum: :func:`damaged_parts` returns the parts
    that are missing for this reason. A file appears whole or not at all. If it replaces an earlier
    file, it also has the parts that only that file had. Raises VaultError with one line when a file
    cannot be written; then the earlier file remains.
    """
    directory.mkdir(parents=True, exist_ok=True)
    sync(directory.parent)
    with store.gate.lock:
        held = {h.role for h in store.table.holdings() if h.generation == generation}
    written = []
    for role in sorted(held):
        path = _dump_role(store, directory, role, generation, boundary)
        if path is not None:
            written.append(str(path))
    return written


def generation_name(generation: Generation) -> str:
    """Return the name of the directory with the dump files of a generation."""
    return f"{generation.lineage}-{generation.iteration}"


def dump_held(store: SlotStore, base: Path, generations: Iterable[Generation]) -> list[str]:
    """Write this node's parts of these generations, the newest first, to directories below
    ``base``, and return the paths. Raises VaultError after writing the files that had space.
    """
    written: list[str] = []
    for generation in sorted(generations, reverse=True):
        try:
            written += dump(store, base / generation_name(generation), generation, None)
        except (VaultError, OSError) as error:
            raise VaultError(f"{error}; {len(written)} files were written before") from error
    return written


def damaged_parts(store: SlotStore) -> list[BadPart]:
    """Return the parts that a dump of this node lacks because their bytes were found damaged, in
    this dump or earlier, and this node has no other bytes of them."""
    with store.gate.lock:
        table = store.table
        found = {
            BadPart(store.gate.node, slot.segment.layout.role, slot.generation, part.name)
            for slot in table.sealed()
            for part in slot.segment.layout.parts
            if slot.segment.entry(slot.slot, part.name).state is segments.PartState.BAD
        }
        return sorted(bad for bad in found if not table.find(bad.role, bad.generation, bad.part))


def inventory_of(node: int, directory: Path) -> Inventory | None:
    """Return the inventory of a directory before its vault starts; None if nothing is sealed.

    The slots do not change until the vault adopts a record, so the inventory is as final as after a
    close. Raises SegmentError when there are slots that cannot be read.
    """
    table = Table(directory)
    table.scan()
    table.require_read()
    table.remove_empty()  # segments of processes that died before they computed anything
    holdings = table.holdings()
    return Inventory(node, 0, holdings, table.layouts()) if holdings else None


def incarnations(node: int, directory: Path) -> dict[int, int]:
    """Return local rank -> the highest incarnation of ``node`` with slots in ``directory``. A new
    process must not get the same name, as its slots would be the same file."""
    found: dict[int, int] = {}
    for path in directory.glob("own-*.seg"):
        with contextlib.suppress(SegmentError):
            _, seat = segments.parse_name(path.name)
            if seat is not None and seat.node == node:
                found[seat.local_rank] = max(found.get(seat.local_rank, -1), seat.incarnation)
    return found


def newest_sealed(directory: Path) -> Generation:
    """Return the newest sealed generation of all segments; (-1, -1) where nothing is sealed."""
    newest = Generation(-1, -1)
    for path in directory.glob("*.seg"):
        with contextlib.suppress(SegmentError, OSError):
            segment = segments.Segment.open(path, writable=False)
            newest = max([newest, *(sealed[1] for sealed in segment.sealed_slots())])
    return newest


def dump_kept(
    node: int, directory: Path, settings: Settings, kept: Mapping[int, int], base: Path
) -> list[str]:
    """Write the generations of ``kept`` lineages in ``directory`` below ``base``; return the files.

    Raises VaultError when a file cannot be written. Raises SegmentError when there are slots that
    cannot be read, after all others have been written.
    """
    store = SlotStore(scheme_of, node, directory, settings, lambda _: None)
    store.table.scan()
    held = {holding.generation for holding in store.table.holdings()}
    written = dump_held(
        store, base, [generation for generation in held if is_kept(kept, generation)]
    )
    store.table.require_read()
    return written


def _dump_role(
    store: SlotStore, directory: Path, role: int, generation: Generation, boundary: str | None
) -> Path | None:
    with store.gate.lock:
        layout = store.table.layout(role)
    if layout is None:
        return None
    path = directory / segments.dump_name(role, store.gate.node)
    names = tuple(part.name for part in layout.parts)
    if boundary is not None:
        names = (*layout.shard_parts, records.extras_part(boundary))
    with store.gate.lock:
        found = {name: store.table.find(role, generation, name) for name in names}
        pinned = [place for places in found.values() for place in places]
        for place in pinned:
            store.table.pin(place)
    kept: dict[str, Place] = {}
    try:
        for name, places in found.items():
            for place in places:
                if (digest := segments.checksum(place.view)) == place.checksum:
                    kept[name] = place
                    break
                store.mark_bad(place, digest)
        for name, place in _written_before(path, layout, generation).items():
            if name not in kept and _is_intact(place, store.settings.chunk_bytes):
                kept[name] = place
        if kept:
            _write_dump(path, layout, generation, kept, store.settings.chunk_bytes)
    finally:
        with store.gate.lock:
            for place in pinned:
                store.table.unpin(place)
    return path if kept else None


def _written_before(path: Path, layout: RoleLayout, generation: Generation) -> dict[str, Place]:
    """Return the sealed parts of an earlier dump at ``path``; their slots in memory may have been
    damaged or overwritten since."""
    try:
        dumped = segments.Segment.open(path, writable=False)
    except (SegmentError, OSError):
        return {}
    if dumped.layout.layout_hash != layout.layout_hash or dumped.generation(0) != generation:
        return {}
    return {
        name: Place.of(dumped, 0, name, entry)
        for name, entry in dumped.entries(0).items()
        if entry.state is segments.PartState.SEALED
    }


def _is_intact(place: Place, piece_bytes: int) -> bool:
    """Return whether the bytes of a part in a file match its checksum."""
    digest, piece = xxhash.xxh3_64(), memoryview(bytearray(min(place.nbytes, piece_bytes)))
    try:
        for start in range(0, place.nbytes, piece_bytes):
            part = piece[: place.nbytes - start]
            place.segment.read_into(place.slot, place.name, start, part)
            digest.update(part)
    except (SegmentError, OSError):
        return False
    return digest.intdigest() == place.checksum


def _write_dump(
    path: Path,
    layout: RoleLayout,
    generation: Generation,
    places: Mapping[str, Place],
    chunk_bytes: int,
) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        dumped = segments.Segment.create(unfinished, layout, None, places, 1)
        dumped.open_slot(0, generation, generation.lineage)
        for name, place in places.items():
            view = place.view
            for start in range(0, len(view), chunk_bytes):
                dumped.write_from(0, name, start, view[start : start + chunk_bytes])
            dumped.seal_part(0, name, place.nbytes, place.checksum, generation.lineage)
        dumped.flush()
        unfinished.rename(path)
    except (OutOfSpace, OSError) as error:
        unfinished.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or "no room"
        needed, free = sum(place.nbytes for place in places.values()), free_bytes(path.parent)
        raise VaultError(
            f"{path} cannot be written ({reason}): {needed} bytes needed, {free} free"
        ) from error
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)  # the memory may be freed after a dump
