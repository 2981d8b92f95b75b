"""Restores a role: fetches or produces every part of the generation that an epoch starts from.

For each part the sources of the record are tried in order. A source that lacks the part or sends
damaged bytes is dropped; a source that cannot be reached, or has not adopted the epoch yet, is
retried until the deadline. After the last source the schemes of the role's recipe produce the part.
All checked parts are written to a slot of the member's own segment, as if it had written them.

If the generation was computed at another size, a role cuts its parts from the parts of several old
roles. The bytes that it needs are copied to its slot while an old part arrives, and its own part is
sealed after all these old parts have matched their checksums. So only old parts that have to be
decoded take memory.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import xxhash

from deadpool_megatron.layout import records, shard_map
from deadpool_megatron.layout.planner import PartIndex
from deadpool_megatron.layout.records import EpochRecord, Recipe, RoleLayout, Source
from deadpool_megatron.layout.shard_map import CannotReshard, Span
from deadpool_megatron.vault import slot_memory, transport
from deadpool_megatron.vault.disk.dump import dump_files
from deadpool_megatron.vault.disk.sources import dumped_parts, holds, node_of
from deadpool_megatron.vault.errors import (
    CutRefused,
    OutOfSpace,
    Refused,
    RestoreUnavailable,
    VaultError,
    is_shortage,
)
from deadpool_megatron.vault.shm.segment import Segment, checksum
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.slot_store import SlotStore

if TYPE_CHECKING:
    from deadpool_megatron.vault.schemes.parity_decode import Decoder

log = logging.getLogger(__name__)
_PAUSE_SECONDS = 0.05
T = TypeVar("T")
# Node and role of a source, and the reason why its bytes could not be used.
Attempt = tuple[int, int, str]
# Takes bytes of an old part, with their offset in it.
Put = Callable[[int, memoryview], None]


class _SourceUnusable(Exception):
    """A source that cannot give the part, now or later."""


class _NoSlotYet(ConnectionError):
    """A thread of a closed epoch still holds the slot. The fetch is retried, as from an unreachable
    source."""


class _Wanted(NamedTuple):
    """A part of the restored generation, and its sources."""

    name: str
    sources: tuple[Source, ...]


class Restorer:
    """Gets the parts of a role for an epoch. For one thread.

    A role of another size has no seat: its parts are only read, or decoded into a copy segment.
    """

    def __init__(self, store: SlotStore, record: EpochRecord, role: int) -> None:
        self._store = store
        self._gate = store.gate
        self._record = record
        self._role = role
        self._seat = record.seats.get(role)
        self._channels: dict[int, transport.Channel] = {}
        self._silent: set[int] = set()
        # The owner's bytes and checksum of parts that its peers hold.
        self._known_sums = dict[str, tuple[int, int]]()
        self._generation = record.restore.generation
        self._extras = records.extras_part(record.restore.boundary)
        self._recipe = record.restore.recipes.get(role, Recipe())
        self._decoder: Decoder | None = None
        self._index: PartIndex | None = None
        self._old = {old: Restorer(store, record, old) for old in self._recipe.cut}
        self._old_layouts: dict[int, RoleLayout] = {}

    def describe(self, layout_hash: str = "") -> RoleLayout | None:
        """Return the layout of the role from its sources, so that fetching can start early. With
        ``layout_hash``, return only a layout with this hash, possibly from this node."""
        with self._gate.lock:
            held = self._store.table.layout(self._role)
        if held is not None and held.layout_hash == layout_hash:
            return held
        found = [*self._record.restore.sources.get(self._role, {}).values()]
        nodes = {s.node for listed in found for s in listed if s.role == self._role}
        for node in sorted(nodes - {self._gate.node}):
            try:
                channel = self._channel(node)
                channel.send({"t": "describe", "role": self._role})
                layout = channel.receive()["layout"]
                if layout is not None and layout_hash in ("", layout["layout_hash"]):
                    return RoleLayout.from_dict(layout)
            except (_SourceUnusable, *transport.UNREACHABLE) as error:
                log.info("describe role %d by node %d: %s", self._role, node, error)
                self._forget(node)
        return None

    def obtain(self, layout: RoleLayout) -> dict[str, Place]:
        """Return a checked place in this node's memory for each shard part and the extras.

        Raises RestoreUnavailable, or VaultError when there is no memory or the epoch was closed;
        CutRefused for a role of another size than the generation's.
        """
        deadline = time.monotonic() + self._store.settings.restore_seconds
        with contextlib.closing(self):
            while True:
                try:
                    return {
                        wanted.name: self._obtain_part(layout, wanted, deadline)
                        for wanted in self._wanted(layout)
                    }
                except OutOfSpace as error:
                    if not self._recipe.cut:
                        raise
                    raise CutRefused(str(error)) from error
                except OSError as error:  # the directory of a dump cannot be read
                    if not is_shortage(error) or time.monotonic() > deadline:
                        reason = f"{self._record.restore.path}: {error.strerror or error}"
                        here = (self._gate.node, self._role, reason)
                        raise RestoreUnavailable(self._extras, (here,)) from error
                self._gate.pause(self._record.epoch, _PAUSE_SECONDS)
                self._gate.require_open(self._record.epoch)

    def _wanted(self, layout: RoleLayout) -> list[_Wanted]:
        sources = self._record.restore.sources.get(self._role, {})
        # Extras come first: a node that has them knows the checksums of the parts that it lacks.
        names = (self._extras, *layout.shard_parts)
        return [_Wanted(name, sources.get(name, ())) for name in names]

    def cut(self) -> None:
        """Break all connections, from any thread: the epoch is over."""
        for channel in list(self._channels.values()):
            channel.shutdown()
        if self._decoder is not None:
            self._decoder.cut()
        for old in self._old.values():
            old.cut()

    def close(self) -> None:
        """Close all connections."""
        for node in list(self._channels):
            self._forget(node)

    def _obtain_part(self, layout: RoleLayout, wanted: _Wanted, deadline: float) -> Place:
        found = self._first_of(wanted, deadline, partial(self._fetch, layout, wanted))
        if isinstance(found, Place):
            return found
        if self._record.restore.kind == "dump":
            return self._load(layout, wanted, deadline)
        return self._rebuild(layout, wanted.name, self._recipe, found, deadline)

    def _first_of(
        self, wanted: _Wanted, deadline: float, fetch: Callable[[Source], T]
    ) -> T | list[Attempt]:
        """Return the result of ``fetch`` for the first source for which it succeeds, or the
        failures of all sources."""
        tried: list[Attempt] = []
        here = Source(self._gate.node, self._role)
        sources = [here, *(source for source in wanted.sources if source != here)]
        while sources:
            # A node that could not be reached for a part is tried last for the next part.
            for source in sorted(sources, key=lambda source: source.node in self._silent):
                self._gate.require_open(self._record.epoch)
                try:
                    return fetch(source)
                except _SourceUnusable as error:
                    sources.remove(source)
                    if source in wanted.sources:
                        tried.append((source.node, source.role, str(error)))
                except transport.UNREACHABLE as error:
                    self._forget(source.node)
                    self._silent.add(source.node)
                    if time.monotonic() > deadline:
                        sources.remove(source)
                        tried.append((source.node, source.role, f"unreachable: {error}"))
            self._gate.pause(self._record.epoch, _PAUSE_SECONDS)
        return tried

    def _rebuild(
        self, layout: RoleLayout, part: str, recipe: Recipe, tried: list[Attempt], deadline: float
    ) -> Place:
        """Produce a part that no node holds whole. Raises RestoreUnavailable."""
        if recipe.decodings:
            if self._decoder is None:  # imported only where parts are coded
                from deadpool_megatron.vault.schemes.parity_decode import Decoder

                self._decoder = Decoder(self._store, self._record, self._role, self._target)
            place = self._decoder.obtain(layout, part, recipe, tried, deadline)
            if place is not None:
                return place
        if recipe.cut and part in layout.shard_parts:
            return self._cut_part(layout, part, deadline)
        raise RestoreUnavailable(part, tuple(tried))

    # Cutting.

    def _cut_part(self, layout: RoleLayout, name: str, deadline: float) -> Place:
        """Cut a part from the parts of old roles. Raises CutRefused if their layouts do not give
        it, RestoreUnavailable if a part of them cannot be had."""
        store, epoch = self._store, self._record.epoch
        nbytes = next(part.nbytes for part in layout.parts if part.name == name)
        spans, gaps = self._spans(layout, name, nbytes, deadline)

        @contextlib.contextmanager
        def opened(chosen: Sequence[Span]) -> Iterator[Put]:
            with self._target(layout) as (segment, slot):
                store.open_part(segment, slot, name, epoch)
                yield partial(shard_map.copy_into, segment.data(slot, name, nbytes), chosen)

        def seal() -> Place:
            with self._target(layout) as (segment, slot):
                view = segment.data(slot, name, nbytes)
                for start, end in gaps:
                    view[start:end] = bytes(end - start)
                return store.seal_copy(segment, slot, name, nbytes, checksum(view), epoch)

        for (role, part), chosen in spans.items():
            with contextlib.closing(self._old[role]) as old:
                old._give(self._old_layouts[role], part, partial(opened, chosen), deadline)
        return self._when_free(deadline, seal)

    def _spans(
        self, layout: RoleLayout, name: str, nbytes: int, deadline: float
    ) -> tuple[dict[shard_map.RolePart, list[Span]], list[tuple[int, int]]]:
        """Return the spans of old parts of which a part consists, and the gaps between them. Get
        layouts of old roles, from this node or their sources, until they suffice.
        """
        known = self._old_layouts
        while True:
            for role in self._recipe.cut.keys() - known.keys():
                with contextlib.closing(self._old[role]) as old:
                    if (found := old.describe(self._recipe.cut[role])) is not None:
                        known[role] = found
            maps = {role: old.shard_map.runs.items() for role, old in known.items()}
            held = {(role, part): runs for role, parts in maps.items() for part, runs in parts}
            try:
                spans = shard_map.spans(layout.shard_map.runs.get(name, ()), held)
                return spans, [*shard_map.gaps(chain.from_iterable(spans.values()), nbytes)]
            except CannotReshard as error:
                unknown = self._recipe.cut.keys() - known.keys()
                if not unknown:
                    raise CutRefused(f"part {name} of role {layout.role}: {error}") from error
                if time.monotonic() > deadline:
                    text = shard_map.key_of((min(unknown), name))
                    raise RestoreUnavailable(text, ()) from error
            self._gate.pause(self._record.epoch, _PAUSE_SECONDS)
            self._gate.require_open(self._record.epoch)

    def _give(
        self,
        layout: RoleLayout,
        name: str,
        opened: Callable[[], AbstractContextManager[Put]],
        deadline: float,
    ) -> None:
        """Put the bytes of a part of this role, which has no seat, into ``opened()``. After a
        failure, begin again at the first byte. At the return the whole part has matched its
        checksum."""
        sources = self._record.restore.sources.get(self._role, {}).get(name, ())
        wanted = _Wanted(name, sources)
        size = self._store.settings.chunk_bytes

        def fetch(source: Source) -> None:
            if source == Source(self._gate.node, self._role):
                view = self._find(layout, wanted).view
                with opened() as put:
                    for start in range(0, len(view), size):
                        self._gate.require_open(self._record.epoch)
                        put(start, view[start : start + size])
                return
            channel, nbytes, expected = self._ask(wanted, source)
            if nbytes != next(part.nbytes for part in layout.parts if part.name == name):
                self._forget(source.node)
                raise _SourceUnusable(f"part of {nbytes} bytes is of another layout")
            digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(size, nbytes)))
            with opened() as put:
                for start in range(0, nbytes, size):
                    content = buffer[: nbytes - start]
                    channel.receive_bulk(content, digest.update)
                    put(start, content)
            self._compare(wanted, source, expected, digest.intdigest())

        while isinstance(tried := self._first_of(wanted, deadline, fetch), list):
            try:
                self._rebuild(layout, name, self._recipe, tried, deadline)
            except RestoreUnavailable as error:
                key = shard_map.key_of((self._role, name))
                raise RestoreUnavailable(key, error.tried) from error

    # Sources.

    def _find(self, layout: RoleLayout, wanted: _Wanted) -> Place:
        """Return the place of checked bytes that this node holds for the role, in this layout."""
        with self._gate.lock:
            places = self._store.table.find(self._role, self._generation, wanted.name)
            self._known_sums |= self._store.table.elsewhere(self._role, self._generation)
        for place in places:
            if place.segment.layout.layout_hash != layout.layout_hash:
                continue
            if self._seat is None or place.segment.seat == self._seat:
                found = checksum(place.view)
                if found == place.checksum:
                    return place
            elif isinstance(copied := self._copy(layout, wanted, place), Place):
                return copied
            else:
                found = copied
            self._store.mark_bad(place, found)
        raise _SourceUnusable("not held intact here")

    def _copy(self, layout: RoleLayout, wanted: _Wanted, place: Place) -> Place | int:
        """Copy a part from a copy of the role, or from the slots of a process that had the role
        here. Return the new place, or the wrong checksum of damaged bytes."""
        with self._target(layout) as (segment, slot):
            slot_memory.require_fit(segment, {wanted.name: place.nbytes})
            return self._store.copy_part(place, segment, slot, self._record.epoch)

    def _fetch(self, layout: RoleLayout, wanted: _Wanted, source: Source) -> Place:
        if source == Source(self._gate.node, self._role):
            return self._find(layout, wanted)
        store, epoch = self._store, self._record.epoch
        generation, name = self._generation, wanted.name
        if name == self._extras and source.role == self._role:  # no other role has its checksums
            channel = self._channel(source.node)
            self._known_sums |= transport.ask_elsewhere(channel, source, generation)
        channel, nbytes, expected = self._ask(wanted, source)
        # Memory is allocated only now, as the source might have lacked the part.
        with self._target(layout) as (segment, slot):
            if not 0 <= nbytes <= segment.capacity(name):
                self._forget(source.node)
                raise _SourceUnusable(f"part of {nbytes} bytes does not fit")
            known = self._known_sums.get(name, (nbytes, expected))
            if (nbytes, expected) != known:
                self._forget(source.node)
                where = f"role {source.role} on node {source.node}"
                store.reports.corruption(self._role, generation, name, where, known[1], expected)
                raise _SourceUnusable("not the bytes that the role had")
            store.open_part(segment, slot, name, epoch)
            found = transport.receive_part(channel, segment, slot, name, nbytes)
            self._compare(wanted, source, expected, found)
            return store.seal_copy(segment, slot, name, nbytes, expected, epoch)

    def _ask(self, wanted: _Wanted, source: Source) -> tuple[transport.Channel, int, int]:
        """Request a part, and return the channel on which it arrives, its bytes and checksum."""
        channel, epoch = self._channel(source.node), self._record.epoch
        try:
            about = transport.ask_part(channel, epoch, source, self._generation, wanted.name)
        except Refused as refused:
            raise _SourceUnusable(str(refused)) from refused
        return channel, *about

    def _compare(self, wanted: _Wanted, source: Source, expected: int, found: int) -> None:
        if found != expected:
            about = self._role, self._generation, wanted.name, f"from node {source.node}"
            self._store.reports.corruption(*about, expected, found)
            raise _SourceUnusable("checksum does not match")

    def _load(self, layout: RoleLayout, wanted: _Wanted, deadline: float) -> Place:
        """Read a part from the dump files of the role, or of a role with the same bytes, or decode
        it from the files of other roles. Only decoding reads the headers of all files, as a large
        run has thousands of files."""
        tried: list[Attempt] = []
        directory = Path(self._record.restore.path)
        replicas = {part.name: part.replicas for part in layout.parts}.get(wanted.name, ())
        for role in (self._role, *(other for other in replicas if other != self._role)):
            for dumped in dump_files(directory, role):
                has_part, reason = self._look_in(dumped, layout, wanted)
                if has_part:
                    try:
                        place = self._read_when_free(dumped, layout, wanted, deadline)
                    except OSError as error:  # the disk fails: try the next file
                        if is_shortage(error):
                            raise
                        place, reason = None, f"{type(error).__name__}: {error}"
                    if place is not None:
                        return place
                tried.append((node_of(dumped), role, reason))
        if self._index is None:
            of = {self._role: layout}
            self._index = dumped_parts(directory, self._generation, self._record.seats, of)
        for recipe in self._index.alternatives(self._role, wanted.name, self._generation):
            with contextlib.suppress(RestoreUnavailable):
                return self._rebuild(layout, wanted.name, recipe, tried, deadline)
        raise RestoreUnavailable(wanted.name, tuple(tried))

    def _look_in(self, dumped: Segment, layout: RoleLayout, wanted: _Wanted) -> tuple[bool, str]:
        """Return whether a file has the part, and the reason to report: that the file lacks it, or,
        if its bytes turn out to be damaged, their checksum."""
        if dumped.layout.role == layout.role:
            if dumped.layout.layout_hash != layout.layout_hash:
                return False, "other layout"
        elif not any(dumped.layout.has(p) for p in layout.parts if p.name == wanted.name):
            return False, "other parameters"
        has_part = holds(dumped, wanted.name, self._generation.iteration)
        return has_part, "checksum does not match" if has_part else "not in the file"

    def _read_when_free(
        self, dumped: Segment, layout: RoleLayout, wanted: _Wanted, deadline: float
    ) -> Place | None:
        """Read a part as soon as a slot is free; None if its bytes are damaged. Raises OSError
        when its disk fails, or no slot is free at the deadline."""
        name = wanted.name
        entry = dumped.entry(0, name)
        place = Place.of(dumped, 0, name, entry)

        def copy() -> Place | int:
            with self._target(layout) as (segment, slot):
                slot_memory.require_fit(segment, {name: entry.nbytes})
                return self._store.copy_part(place, segment, slot, self._record.epoch)

        found = self._when_free(deadline, copy)
        if isinstance(found, Place):
            return found
        about = (self._role, dumped.generation(0), name, str(dumped.path))
        self._store.reports.corruption(*about, place.checksum, found)
        return None

    def _when_free(self, deadline: float, action: Callable[[], T]) -> T:
        """Return the result of ``action`` as soon as it finds a free slot."""
        while True:
            try:
                return action()
            except _NoSlotYet:
                if time.monotonic() > deadline:
                    raise
            self._gate.pause(self._record.epoch, _PAUSE_SECONDS)
            self._gate.require_open(self._record.epoch)

    @contextlib.contextmanager
    def _target(self, layout: RoleLayout) -> Iterator[tuple[Segment, int]]:
        """Claim the slot for the generation, but only while bytes arrive: a thread of a closed
        epoch that still waits for a connection must not keep the slot."""
        store, epoch = self._store, self._record.epoch
        if self._seat is None:
            segment = slot_memory.ensure_copy(store, layout, self._generation)
        else:
            segment = slot_memory.ensure_own(store, layout, self._seat, epoch=epoch)
        slot = store.claim(segment, self._generation, epoch)
        if slot is None:
            raise _NoSlotYet("no slot is free yet")
        try:
            if self._seat is None:
                slot_memory.reserve(store, segment, layout.shard_parts, slot, self._generation)
            yield segment, slot
        finally:
            self._store.release(segment, slot)

    def _channel(self, node: int) -> transport.Channel:
        if node not in self._channels:
            try:
                self._channels[node] = self._gate.dial(node)
            except VaultError as error:
                raise _SourceUnusable(str(error)) from error
            if not self._gate.is_open(self._record.epoch):
                raise ConnectionError("the epoch was closed while connecting")
        return self._channels[node]

    def _forget(self, node: int) -> None:
        channel = self._channels.pop(node, None)
        if channel is not None:
            channel.close()
