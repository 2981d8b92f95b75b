"""A shard part on its way to a buddy without the high halves of its masters: both ends.

The owner offers it (``halves`` in a put, after one ``masters`` on the connection that says where
they lie); the buddy chooses in ``need``, if a peer of the owner on its node keeps the owner's
weights. Then travel, instead of the part's bytes: those between the masters, the low halves, a
frame ``exceptions`` with their number, and these (:mod:`deadpool_megatron.vault.compaction`). The
low halves wait in the slot itself, in the first half of each run of masters. When the base is
sealed the masters are put together in place; only if the checksum of the whole part is the owner's
it is sealed, and is then a copy like any other.

If anything of this fails (no base of that generation, other bytes) the buddy says so in ``sealed``
under ``whole``, and the owner sends that part of that generation again, whole. So it does when no
answer comes: nothing is tried twice that may have broken the connection, or the buddy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deadpool_megatron.events import Event
from deadpool_megatron.events import Kind as EventKind
from deadpool_megatron.layout.bases import MASTERS_PART, Masters, unpack_masters
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.layout.schemes import Kind
from deadpool_megatron.vault.bases import Base, BasePlace, await_base, find_place
from deadpool_megatron.vault.compaction import (
    EXCEPTION_BYTES,
    Exceptions,
    Splitter,
    join_in_place,
    low_places,
    most_exceptions,
)
from deadpool_megatron.vault.segment import Segment, checksum
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.table import Place
from deadpool_megatron.vault.transport import Channel
from deadpool_megatron.wire.framing import WireError

log = logging.getLogger(__name__)
# For a base that is not there when all else has arrived (its member is held up, or has ended),
# beyond the time that this has taken: larger shards take everybody longer.
_PATIENCE_SECONDS = 1.0
# So many failures in a row, and the pair ships whole until the end of the epoch.
_MOST_FAILURES = 3
_MOST_VALUES = 1 << 32  # the number of an exception has 32 bits
# Sends a piece of a part at the pace of all protection traffic.
Send = Callable[[memoryview], None]


class HalvesSender:
    """The owner's side, for one role and one buddy in one epoch. The thread of their shipper."""

    def __init__(self, state: VaultState, layout: RoleLayout, node: int, epoch: int) -> None:
        self._state = state
        self._layout = layout
        self._node = node
        self._epoch = epoch
        self._failures = 0  # in a row, and why the last one
        self._why = ""
        self._offered: Generation | None = None
        self._tried: Generation | None = None  # whatever came of it
        self._told: Channel | None = None
        self._digest: int | None = None
        self._masters: dict[str, Masters] = {}

    def offer(
        self, channel: Channel, generation: Generation, places: Iterable[Place]
    ) -> dict[str, Masters]:
        """The parts that may travel as halves; the buddy has been told where their masters lie."""
        if self._failures >= _MOST_FAILURES:
            if self._why:
                self._warn(self._why)
                self._why = ""
            return {}
        if generation.lineage != self._epoch or generation == self._tried:
            return {}
        self._offered = generation
        self._look_up(generation)
        with self._state.lock:
            copied = {
                place.name
                for place in places
                if place.name in self._masters
                and self._state.steps.scheme(self._layout.role, place.name).kind is Kind.BUDDY
                and place.nbytes == place.segment.capacity(place.name)
            }
        found = {name: self._masters[name] for name in sorted(copied)}
        if found and channel is not self._told:
            lists = {name: masters.to_list() for name, masters in self._masters.items()}
            channel.send({"t": "masters", "parts": lists})
            self._told = channel
        return found

    def _look_up(self, generation: Generation) -> None:
        """The own member writes beside each generation where its masters are: always the same."""
        with self._state.lock:
            held = self._state.table.find(self._layout.role, generation, MASTERS_PART)
        if not held or held[0].checksum == self._digest:
            return
        self._digest, self._told, self._masters = held[0].checksum, None, {}
        try:
            self._masters = checked(self._layout, unpack_masters(held[0].view))
        except (ValueError, TypeError, AttributeError) as error:
            log.warning("role %d: masters not understood: %s", self._layout.role, error)

    def send(self, channel: Channel, place: Place, masters: Masters, send: Send) -> int:
        """Send a part that the buddy wants as halves; answers the bytes of its exceptions."""
        if self._tried != self._offered:  # until the buddy says otherwise
            self._tried, self._why = self._offered, "no answer"
            self._failures += 1
        for begin, end in masters.gaps(place.nbytes):
            send(place.view[begin:end])
        splitter = Splitter(place.view, masters)
        for piece in splitter.pieces():
            send(piece)
        found = splitter.exceptions
        if found is None:
            channel.send({"t": "exceptions", "count": None})
            return 0
        channel.send({"t": "exceptions", "count": found.places.size})
        for array in (found.places, found.values):
            if array.size:
                send(array.data.cast("B"))
        return found.places.size * EXCEPTION_BYTES

    def ended(self, generation: Generation, chosen: Collection[str], whole: Any) -> None:
        """What the buddy has said of the parts sent as halves; ``whole``: name -> why not."""
        if not chosen:
            return
        failed = {name: str(whole[name]) for name in chosen if name in whole}
        self._state.counters["parts sent as halves"] += len(chosen) - len(failed)
        if not failed:
            self._failures = 0
            return
        name, self._why = next(iter(failed.items()))
        role, why = self._layout.role, self._why
        log.info("%s of %s of role %d as halves: %s", name, generation, role, why)

    def _warn(self, why: str) -> None:
        text = (
            f"--deadpool-compaction: role {self._layout.role} ships whole to node {self._node} for"
            f" the rest of epoch {self._epoch}: {why}, {_MOST_FAILURES} times in a row"
        )
        log.warning("%s", text)
        self._state.emit(
            Event(
                EventKind.LOG,
                epoch=self._epoch,
                node=self._state.node,
                role=self._layout.role,
                data={"level": "warning", "text": text},
            )
        )


@dataclass(frozen=True)
class Waiting:
    """A part whose low halves wait in a slot; ``exceptions`` None: there are too many."""

    segment: Segment
    slot: int
    name: str
    nbytes: int
    exceptions: Exceptions | None


class HalvesTaker:
    """The buddy's side of one connection, with one role. One thread."""

    def __init__(self, state: VaultState, layout: RoleLayout, lists: Mapping[str, Any]) -> None:
        """``lists``: what ``masters`` says. Raises ValueError, TypeError or AttributeError."""
        self._state = state
        self._layout = layout
        masters = {str(name): Masters.from_list(runs) for name, runs in lists.items()}
        self._masters = checked(layout, masters)
        self._sizes = {part.name: part.nbytes for part in layout.parts}
        self._place: BasePlace | None = None
        self._base: Base | None = None
        self._sought_in = 0  # epoch

    def choose(self, epoch: int, offered: Iterable[str], needed: Mapping[str, int]) -> list[str]:
        """Which parts (name -> bytes) shall come as halves: those offered for which there is, or
        will be, a base here. Raises KeyError for a part of which no masters are known."""
        wanted = [name for name in offered if needed.get(name) == self._sizes[name]]
        if wanted and self._sought_in != epoch:
            self._place, self._sought_in = find_place(self._state, self._layout, epoch), epoch
        self._base = self._place.base(self._state) if wanted and self._place is not None else None
        if self._base is None:
            return []
        capacity = self._base.segment.capacity(self._base.name)
        return [name for name in wanted if self._masters[name].base_bytes <= capacity]

    def receive(
        self, channel: Channel, segment: Segment, slot: int, name: str, nbytes: int
    ) -> Waiting:
        """Take what travels of a part. Raises WireError for more exceptions than there may be."""
        part, masters = segment.data(slot, name, nbytes), self._masters[name]
        for begin, end in (*masters.gaps(nbytes), *low_places(masters)):
            channel.receive_bulk(part[begin:end])
        count = channel.receive()["count"]
        if count is None:
            return Waiting(segment, slot, name, nbytes, None)
        if not 0 <= int(count) <= most_exceptions(masters.count):
            raise WireError(f"{count} exceptions of {masters.count} masters")
        arrays = np.empty((2, int(count)), np.uint32)
        if count:
            channel.receive_bulk(arrays.data.cast("B"))
        received = nbytes - masters.saved_bytes + arrays.nbytes
        self._state.counters["bytes received"] += received
        return Waiting(segment, slot, name, nbytes, Exceptions(arrays[0], arrays[1]))

    def finish(self, waiting: Waiting, expected: int, epoch: int, spent_seconds: float) -> str:
        """Put a part together and compare its checksum; why that is not possible, empty if it is.

        ``spent_seconds``: how long the put has taken so far. Nothing is sealed here.
        """
        segment, slot, name = waiting.segment, waiting.slot, waiting.name
        if waiting.exceptions is None:
            return "too many exceptions"
        generation = segment.generation(slot)
        assert self._base is not None
        # The owner waits for an answer no longer than for any other.
        most = self._state.settings.connect_seconds / 2
        patience = min(_PATIENCE_SECONDS + spent_seconds, most)
        base = await_base(self._state, self._base, generation, epoch, patience)
        if base is None:
            return "no base of this generation"
        part, masters = segment.data(slot, name, waiting.nbytes), self._masters[name]
        if len(base) < masters.base_bytes:
            return "a shorter base"
        join_in_place(part, masters, base, waiting.exceptions)
        return "" if checksum(part) == expected else "other bytes"


def checked(layout: RoleLayout, masters: Mapping[str, Masters]) -> dict[str, Masters]:
    """Masters that lie in shard parts of the layout. Raises ValueError for anything else."""
    sizes = {part.name: part.nbytes for part in layout.parts if part.name in layout.shard_parts}
    for name, one in masters.items():
        if name not in sizes:
            raise ValueError(f"masters in part {name!r}")
        one.check(sizes[name])
        if one.count >= _MOST_VALUES:
            raise ValueError(f"{one.count} masters in one part")
    return {name: one for name, one in masters.items() if one.count}
