"""Replicates a role's sealed parts to their targets: a thread for each target.

No work is queued: missing copies follow from the table and the ledger. So after a broken
connection, a stop or restart of the other vault, or a restart of this vault, the threads resume by
reading table and ledger again. Each buddy has its own thread, so no copy waits for another.

The messages for a generation: the owner sends ``put`` with the parts that it offers, and with the
checksums of parts that are not sent because peers hold the same bytes. The buddy answers ``need``
with the parts that it lacks. The owner sends their raw bytes in that order, and the buddy answers
``sealed``. The holder of a parity block answers ``taken``, and ``sealed`` to a later ``put``
(:mod:`.schemes.parity`). The bytes pass from the mapped slot to the socket without a copy in
Python.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault import slot_memory
from deadpool_megatron.vault.copies import Scheme, Target
from deadpool_megatron.vault.errors import Refusal, Refused, VaultError
from deadpool_megatron.vault.shared_nic import Share
from deadpool_megatron.vault.shm.segment import Segment, checksum
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.slot_store import SlotStore
from deadpool_megatron.vault.transport import UNREACHABLE, Channel
from deadpool_megatron.wire.framing import WireError

log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
_CHECK_SECONDS = 1.0  # bounds what a lost wake-up could cost

# A generation, and the places of its parts that the target lacks.
Work = tuple[Generation, list[Place]]


class Sender(threading.Thread, ABC):
    """Thread that replicates a role's generations of an epoch to a target.

    A subclass ships (sends or copies) a generation; this class chooses the generation, the moment,
    the retries and the connection.
    """

    verb = "ship"

    def __init__(
        self, store: SlotStore, layout: RoleLayout, target: Target, scheme: Scheme
    ) -> None:
        super().__init__(name=f"{self.verb}-{layout.role}-to-{target.node}", daemon=True)
        self._store = store
        self._gate = store.gate
        self._ledger = store.ledger
        self._layout = layout
        self._target = target
        self._node = target.node
        self._scheme = scheme
        self._epoch = scheme.record.epoch
        self._channel: Channel | None = None

    def _next(self) -> Work | None:
        """Return the next generation to ship; None, after a wait for a change, when no part is
        owed."""
        with self._gate.changed:
            work = self._ledger.shipment(self._layout, self._target, self._epoch)
            if work is None and self._is_open():
                self._gate.changed.wait(_CHECK_SECONDS)
            return work

    def _offer_message(self, work: Work, **more: object) -> dict[str, Any]:
        """Return the message that offers a generation."""
        generation, places = work
        return {
            "t": "put",
            "block": self._target.block,
            "epoch": self._epoch,
            "node": self._gate.node,
            "role": self._layout.role,
            "generation": generation.to_list(),
            "layout_hash": self._layout.layout_hash,
            "parts": [[place.name, place.nbytes, place.checksum] for place in places],
            **more,
        }

    @abstractmethod
    def _ship_once(self, work: Work) -> bool:
        """Ship a generation. Return True to continue at once, False to retry after a pause.

        VaultError and the errors of :data:`UNREACHABLE` break the connection; a pause follows.
        """

    def run(self) -> None:
        """Replicate until the epoch is closed."""
        pause = _FIRST_PAUSE_SECONDS
        while self._is_open():
            work = self._next()
            if work is None:
                continue
            try:
                done = self._ship_once(work)
            except (VaultError, *UNREACHABLE) as error:
                log.info("%s: %s: %s", self.name, type(error).__name__, error)
                if self._channel is not None and self._is_open():
                    self._gate.lanes.avoid(self._channel.use)
                self._disconnect()
                done = False
            if done:
                pause = _FIRST_PAUSE_SECONDS
            else:
                self._gate.pause(self._epoch, pause)
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        self._disconnect()

    def cut(self) -> None:
        """Break the connection, from any thread: the epoch is over."""
        channel = self._channel
        if channel is not None:
            channel.shutdown()

    def _is_open(self) -> bool:
        return self._gate.is_open(self._epoch)

    def _connect(self) -> Channel:
        if self._channel is not None and self._channel.use.should_move():
            self._disconnect()
        if self._channel is None:
            self._channel = channel = self._gate.dial(self._node)
            if not self._is_open():
                raise WireError("the epoch was closed while connecting")
            channel.lower_priority(self._store.settings.dscp)
            channel.send({"t": "offer", "layout": self._layout.to_dict()})
        return self._channel

    def _disconnect(self) -> None:
        """Close the connection; only this thread may, since its descriptor could be reused."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _send_paced(self, channel: Channel, flow: Share, place: Place, view: memoryview) -> None:
        """Send a part in pieces, at the pace that ``flow`` sets: all protection traffic has a
        common limit."""
        sent, iteration = 0, flow.generation.iteration
        about = {"role": self._layout.role, "iteration": iteration, "to": self._node}
        for piece in flow.pieces(view, self._is_open):
            piece = failpoints.maybe_corrupted(piece, "vault.chunk", part=place.name, **about)
            channel.send_bulk(piece)
            self._store.reports.counters["bytes shipped"] += len(piece)
            sent += len(piece)
        if sent < len(view):
            raise WireError("the epoch was closed")

    def _examine(self, place: Place) -> None:
        """Mark a part as bad if its bytes here are corrupt, after the receiver's checksum has
        differed."""
        found = checksum(place.view)
        if found != place.checksum:
            self._store.mark_bad(place, found)


def sender_to(target: Target, store: SlotStore, layout: RoleLayout, scheme: Scheme) -> Sender:
    """Return the thread that replicates a role's parts to a target; it is not started yet."""
    kind = LocalCopier if target.node == store.gate.node else Replicator
    return kind(store, layout, target, scheme)


class Replicator(Sender):
    """Thread that ships copies to a buddy."""

    def _ship_once(self, work: Work) -> bool:
        """Ship a generation; True when the buddy has the parts, False to retry after a pause."""
        generation, places = work
        failpoints.hit(
            "vault.ship", role=self._layout.role, iteration=generation.iteration, to=self._node
        )
        channel = self._connect()
        elsewhere = self._ledger.elsewhere(self._layout, generation)
        channel.send(self._offer_message(work, elsewhere=elsewhere))
        answer = channel.receive()
        if refused := Refused.in_answer(answer):
            return self._handle_refusal(refused, generation, places)
        wanted = set(answer["parts"])
        nbytes = sum(place.nbytes for place in places if place.name in wanted)
        link, role = channel.use.lane.nic, self._layout.role
        with Share(link, role, generation, nbytes, self._epoch, channel.sent) as flow:
            for place in places:
                if place.name in wanted:
                    self._send_paced(channel, flow, place, place.view)
            answer = channel.receive()
            if refused := Refused.in_answer(answer):
                return self._handle_refusal(refused, generation, places)
            if nbytes:
                flow.end()
        if len(channel.use.ends) > 1:
            self._store.reports.counters[f"bytes shipped over {link.name}"] += nbytes
        kept = {place.name for place in places} - wanted | {*answer["parts"]}
        names = [place.name for place in places if place.name in kept]
        self._ledger.count_shipped(self._layout.role, nbytes, self._epoch)
        if answer["t"] == "sealed":
            self._ledger.acknowledge(self._layout, generation, self._node, names, self._epoch)
        damaged = [place for place in places if place.name not in kept]
        for place in damaged:
            self._examine(place)
        return not damaged

    def _handle_refusal(
        self, refused: Refused, generation: Generation, places: list[Place]
    ) -> bool:
        """Return True to continue at once, False to retry after a pause."""
        if refused.reason is Refusal.SUPERSEDED:
            names = [place.name for place in places]
            self._ledger.acknowledge(self._layout, generation, self._node, names, self._epoch)
            return True
        if refused.reason is Refusal.WAITED:
            return True  # without a pause: the holder has waited already
        if refused.reason is not Refusal.EARLY:
            self._store.reports.refuse(f"put: {refused}", role=self._layout.role, by=self._node)
        return False


class LocalCopier(Sender):
    """Thread that copies a role's generations of an epoch a second time in the memory of their node
    (REFT's ARC), to ``copy-<role>.seg``, without a connection."""

    verb = "double"

    def _ship_once(self, work: Work) -> bool:
        """Copy a generation; True when all parts exist twice, False to retry after a pause."""
        generation, places = work
        role = self._layout.role
        failpoints.hit("vault.double", role=role, iteration=generation.iteration)
        with self._gate.lock:  # a copy may exist already, even if the slot of the role is lost
            kept = {
                (place.name, place.checksum)
                for name in (place.name for place in places)
                for place in self._store.table.find(role, generation, name)
                if place.segment.seat is None
            }
        missing = [place for place in places if (place.name, place.checksum) not in kept]
        copied = [place.name for place in places if place not in missing]
        try:
            if missing:
                copied += self._copy_parts(generation, missing)
        except VaultError as error:
            if self._is_open():
                self._store.reports.refuse(f"second copy: {error}", role=role)
        self._ledger.acknowledge(self._layout, generation, self._node, copied, self._epoch)
        return len(copied) == len(places)

    def _copy_parts(self, generation: Generation, places: list[Place]) -> list[str]:
        """Copy the parts and return the names of the sealed parts: none while no slot is free.
        Raises VaultError when memory is short or the epoch is closed."""
        store = self._store
        names = [place.name for place in places]
        segment = slot_memory.ensure_copy(store, self._layout, generation)
        slot_memory.require_fit(segment, {place.name: place.nbytes for place in places})
        slot = store.claim(segment, generation, self._epoch)
        if slot is None:
            return []
        try:
            slot_memory.reserve(store, segment, names, slot, generation)
            return [place.name for place in places if self._copy(place, segment, slot)]
        finally:
            store.release(segment, slot)

    def _copy(self, place: Place, segment: Segment, slot: int) -> bool:
        """Copy and seal a part; False if its source is damaged."""
        store = self._store
        if not isinstance(store.copy_part(place, segment, slot, self._epoch), Place):
            self._examine(place)
            return False
        store.reports.counters["bytes doubled"] += place.nbytes
        store.fail_point_corrupt("vault.doubled", place.segment, place.slot, [place.name])
        return True
