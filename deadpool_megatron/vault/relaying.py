"""A buddy's part in a chain: what arrives from the owner goes on to the next buddy, by the chunk.

The bytes are read from the slot into which they arrive, so nothing is kept besides, and a next
buddy that is slow does not hold up what arrives here. The next one is told what the owner has
announced and verifies and seals for itself, whatever becomes of the copy here.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.vault.chain import NOT_REACHED, link
from deadpool_megatron.vault.segment import Segment
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.table import Place
from deadpool_megatron.vault.transport import Channel, Transport
from deadpool_megatron.wire.framing import ConnectionClosed, WireError

log = logging.getLogger(__name__)
_FAILURES = (OSError, WireError, LookupError, TypeError, ValueError)


class _Hold:
    """The pin of one put, given back once, by whoever comes first. Thread-safe."""

    def __init__(self, state: VaultState, place: Place) -> None:
        self.place = place
        self._state = state
        self._held = True
        with state.lock:
            state.table.pin(place)

    def release(self) -> None:
        """Let the slot go."""
        with self._state.lock:
            if self._held:
                self._held = False
                self._state.table.unpin(self.place)


class Relay:
    """Hands the puts of one connection on, one at a time, each from a thread of its own.

    :meth:`arrived` and :meth:`answer` are called by the thread that serves the connection;
    :meth:`close` ends everything.
    """

    def __init__(self, state: VaultState, transport: Transport) -> None:
        self._state = state
        self._transport = transport
        self._changed = threading.Condition()
        self._arrived: dict[str, int] = {}
        self._closed = False
        self._running: threading.Thread | None = None
        self._next: tuple[int, str, Channel] | None = None  # node, layout hash
        # Of a put whose thread is connecting: an address that nobody answers at keeps it for long.
        self._connecting: _Hold | None = None
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def start(
        self,
        put: Mapping[str, Any],
        chain: Sequence[int],
        segment: Segment,
        slot: int,
        parts: Sequence[tuple[str, int, int]],
    ) -> None:
        """Begin to hand on ``parts`` (name, bytes, checksum), which arrive in ``slot``, to the
        nodes of ``chain``. The slot stays pinned meanwhile."""
        self._arrived = {}
        name, nbytes, digest = parts[0]
        hold = _Hold(self._state, Place(segment, slot, name, nbytes, digest))
        thread = threading.Thread(
            target=self._run,
            args=(dict(put), list(chain), hold, list(parts)),
            name=f"relay-{segment.layout.role}-to-{chain[0]}",
            daemon=True,
        )
        with self._changed:
            self._running = thread
        thread.start()

    def arrived(self, name: str, nbytes: int) -> None:
        """So many bytes of a part are there."""
        with self._changed:
            self._arrived[name] = nbytes
            self._changed.notify_all()

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """The next thing that the owner has to hear, or None; one for each node of the chain."""
        try:
            return self._answers.get(timeout=seconds)
        except queue.Empty:
            return None

    def close(self) -> None:
        """Hand on nothing more; the thread ends as soon as its call on the network has failed. The
        slot is free before that if nothing has been read from it yet."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            running, following, hold = self._running, self._next, self._connecting
        if hold is not None:
            hold.release()
        if following is not None:
            following[2].shutdown()
            if running is None:
                following[2].close()

    def _run(
        self,
        put: dict[str, Any],
        chain: list[int],
        hold: _Hold,
        parts: list[tuple[str, int, int]],
    ) -> None:
        left = list(chain)
        why = NOT_REACHED
        try:
            self._hand_on(put, hold, parts, left)
        except _FAILURES as error:
            why = f"{type(error).__name__}: {error}"
            log.info("%s: %s", threading.current_thread().name, why)
            self._disconnect()
        finally:
            hold.release()
            with self._changed:
                # All has been answered, so that the thread of the next put may be there already.
                if self._running is threading.current_thread():
                    self._running = None
                    if self._closed:
                        self._disconnect()
            # The first one that has not answered is the one that failed.
            for number, node in enumerate(left):
                self._answers.put(link(node, [], why if number == 0 else NOT_REACHED))

    def _hand_on(
        self,
        put: dict[str, Any],
        hold: _Hold,
        parts: list[tuple[str, int, int]],
        left: list[int],
    ) -> None:
        """Takes the nodes that have been heard of off ``left``."""
        epoch, node = int(put["epoch"]), left[0]
        channel = self._connect(node, hold, epoch)
        pinned = hold.place
        channel.send({**put, "chain": left[1:]})
        answer = channel.receive()
        chained = bool(answer.get("chain"))
        if answer["t"] != "refused":
            wanted = set(answer["parts"])
            for name, nbytes, _ in parts:
                if name in wanted:
                    self._send(channel, pinned, name, nbytes, epoch, node)
            answer = channel.receive()
        del left[0]
        if answer["t"] == "refused":
            self._answers.put(link(node, [], str(answer["why"])))
            return
        self._answers.put(link(node, [str(name) for name in answer["parts"]]))
        while chained and left:
            answer = channel.receive()
            left.remove(int(answer["node"]))
            self._answers.put(
                link(int(answer["node"]), [str(n) for n in answer["parts"]], str(answer["why"]))
            )

    def _send(
        self, channel: Channel, pinned: Place, name: str, nbytes: int, epoch: int, node: int
    ) -> None:
        view = pinned.segment.data(pinned.slot, name, nbytes)
        size = self._state.settings.chunk_bytes
        role = pinned.segment.layout.role
        iteration = pinned.segment.generation(pinned.slot).iteration

        def going() -> bool:
            return not self._closed and self._state.is_open(epoch)

        for start in range(0, nbytes, size):
            end = min(start + size, nbytes)
            self._await(name, end)
            chunk = failpoints.perhaps_damaged(
                view[start:end], "vault.relay", role=role, iteration=iteration, to=node, part=name
            )
            for piece in self._state.traffic.pieces(chunk):
                self._state.traffic.limit(len(piece), going)
                if not going():
                    raise ConnectionClosed("the epoch was closed")
                channel.send_bulk(piece)
                self._state.counters["bytes handed on"] += len(piece)

    def _await(self, name: str, nbytes: int) -> None:
        """Until so many bytes of the part are there."""
        limit = self._state.settings.connect_seconds
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._closed or self._arrived.get(name, 0) >= nbytes, limit
            )
            if self._closed:
                raise ConnectionClosed("the sender has gone")
        if not there:
            raise TimeoutError(f"bytes {nbytes} of part {name} have not arrived in {limit:g} s")

    def _connect(self, node: int, hold: _Hold, epoch: int) -> Channel:
        layout = hold.place.segment.layout
        with self._changed:
            following = self._next
        if following is not None:
            if following[:2] == (node, layout.layout_hash):
                return following[2]
            self._disconnect()
        with self._state.lock:
            address = self._state.address(node) if self._state.is_open(epoch) else None
        if address is None:
            raise WireError(f"node {node} has no address in epoch {epoch}")
        with self._changed:
            if self._closed:
                raise ConnectionClosed("the sender has gone")
            self._connecting = hold
        try:
            channel = self._transport.connect(address.host, address.vault_port)
        except BaseException:
            with self._changed:
                self._connecting = None
            raise
        with self._changed:
            self._connecting = None
            self._next = node, layout.layout_hash, channel
            if self._closed:  # the hold is released, so nothing may be read any more
                raise ConnectionClosed("the sender has gone")
        channel.give_way(self._state.settings.dscp)
        channel.send({"t": "offer", "layout": layout.to_dict()})
        return channel

    def _disconnect(self) -> None:
        """Only the thread of a put closes while there is one."""
        with self._changed:
            following, self._next = self._next, None
        if following is not None:
            following[2].close()
