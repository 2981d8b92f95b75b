"""One coded block on its way from another vault, received in pieces by a thread of its own.

The receiver checks the bytes as they come against the checksum that the sending vault keeps of
them; the thread that decodes learns of it at the end of the block.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import xxhash

from deadpool_megatron.layout.records import EpochRecord, Source
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.transport import Channel
from deadpool_megatron.wire.framing import WireError

_MOST_SMALL_BYTES = 16 << 20
_PIECES = 2  # of each block: one is decoded while the other one arrives
_UNREACHABLE = (OSError, WireError, LookupError, TypeError, ValueError)

# A new connection to the vault of a node.
Dial = Callable[[int], Channel]


class BlockError(Exception):
    """A block did not come. ``final``: nor will it from this place; ``damaged``: it came wrong."""

    def __init__(
        self,
        number: int,
        source: Source | None,
        why: str,
        *,
        final: bool = False,
        damaged: bool = False,
    ) -> None:
        super().__init__(why)
        self.number, self.source, self.final, self.damaged = number, source, final, damaged


class Block(threading.Thread):
    """Receives one block in pieces. :meth:`take`, :meth:`give_back` and :meth:`finish` are for the
    thread that decodes; it puts zeros behind the end of a block that is shorter than others.
    """

    def __init__(
        self,
        state: VaultState,
        record: EpochRecord,
        number: int,
        source: Source,
        name: str,
        dial: Dial,
        wanted: tuple[int, int] | None,
    ) -> None:
        super().__init__(name=f"block-{source.role}-from-{source.node}", daemon=True)
        self.number = number
        # Bytes and checksum that it must have; None for parity, which nobody else vouches for.
        self._wanted = wanted
        self._state = state
        self._record = record
        self._source = source
        self._part = name
        self._dial = dial
        self._channel: Channel | None = None
        self._over = threading.Event()
        # A piece and how many of its bytes have come; None at the end of the block.
        self._full: queue.SimpleQueue[tuple[bytearray, int] | BlockError | None] = (
            queue.SimpleQueue()
        )
        self._free: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._piece: bytearray | None = None
        self._ended = False

    def cut(self) -> None:
        """End it, from any thread."""
        self._over.set()
        self._free.put(None)
        channel = self._channel
        if channel is not None:
            channel.shutdown()

    # For the thread that decodes.

    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes, valid until :meth:`give_back`. Raises BlockError."""
        filled = self._next()
        if self._piece is None:
            self._piece = bytearray(count)
        view = memoryview(self._piece)[:count]
        if filled < count:
            view[filled:] = bytes(count - filled)
        return view

    def give_back(self) -> None:
        """The bytes of :meth:`take` have been used."""
        if not self._ended and self._piece is not None:
            self._free.put(self._piece)
            self._piece = None

    def finish(self) -> None:
        """Wait for the rest of the block, and for its checksum. Raises BlockError."""
        while not self._ended:
            self._next()
            self.give_back()

    def _next(self) -> int:
        """How many bytes have come in the next piece; 0 behind the end."""
        if self._ended:
            return 0
        limit = 3 * self._state.settings.connect_seconds  # connect, prove, answer
        try:
            got = self._full.get(timeout=limit)
        except queue.Empty:
            raise self._error(f"no bytes for {limit:g} s") from None
        if isinstance(got, BlockError):
            raise got
        if got is None:
            self._ended = True
            return 0
        self._piece, filled = got
        return filled

    def _error(self, why: str, *, final: bool = False, damaged: bool = False) -> BlockError:
        return BlockError(self.number, self._source, why, final=final, damaged=damaged)

    # The thread that receives.

    def run(self) -> None:
        """Until the block is here, or has failed, or is not wanted any more."""
        try:
            self._receive()
            self._full.put(None)
        except BlockError as error:
            self._full.put(error)
        except _UNREACHABLE as error:
            self._full.put(self._error(f"{type(error).__name__}: {error}"))
        except VaultError as error:
            self._full.put(self._error(str(error), final=True))
        finally:
            if self._channel is not None:
                self._channel.close()

    def small(self) -> bytes:
        """The whole part, which has to be a small one, in the calling thread. Raises BlockError,
        or ValueError for one that is too large."""
        try:
            channel, nbytes, expected = self._ask()
            if nbytes > _MOST_SMALL_BYTES:
                raise ValueError(f"{nbytes} bytes")
            content = bytearray(nbytes)
            channel.receive_bulk(memoryview(content))
        except (OSError, WireError, LookupError, TypeError) as error:
            raise self._error(f"{type(error).__name__}: {error}") from error
        finally:
            if self._channel is not None:
                self._channel.close()
        found = xxhash.xxh3_64_intdigest(content)
        if found != expected:
            raise self._damaged(expected, found)
        return bytes(content)

    def _receive(self) -> None:
        channel, nbytes, expected = self._ask()
        if self._wanted is not None and self._wanted != (nbytes, expected):
            raise self._error("holds other bytes than the parity was computed from", final=True)
        size = self._state.settings.chunk_bytes
        for _ in range(_PIECES):
            self._free.put(bytearray(size))
        digest = xxhash.xxh3_64()
        for start in range(0, nbytes, size):
            piece = self._free.get()
            if piece is None or self._over.is_set():
                raise self._error("is not wanted any more")
            filled = min(size, nbytes - start)
            channel.receive_bulk(memoryview(piece)[:filled])
            digest.update(memoryview(piece)[:filled])
            self._full.put((piece, filled))
        if digest.intdigest() != expected:
            raise self._damaged(expected, digest.intdigest())

    def _ask(self) -> tuple[Channel, int, int]:
        """Have the part sent: the channel it comes by, its size in bytes and its checksum."""
        state, record = self._state, self._record
        try:
            self._channel = channel = self._dial(self._source.node)
        except VaultError as error:
            raise self._error(str(error), final=True) from error
        if self._over.is_set() or not state.is_open(record.epoch):
            raise self._error("the epoch was closed while connecting")
        channel.send(
            {
                "t": "fetch",
                "epoch": record.epoch,
                "node": state.node,
                "role": self._source.role,
                "generation": record.restore.generation.to_list(),
                "part": self._part,
            }
        )
        answer = channel.receive()
        if answer["t"] == "refused":
            early = answer["why"] == "early"
            raise self._error(
                "has not adopted the epoch yet" if early else str(answer["why"]), final=not early
            )
        nbytes, expected = int(answer["nbytes"]), int(answer["checksum"])
        if nbytes < 0:
            raise self._error(f"part of {nbytes} bytes", final=True)
        return channel, nbytes, expected

    def _damaged(self, expected: int, found: int) -> BlockError:
        generation = self._record.restore.generation
        self._state.counters["corruption"] += 1
        where = f"from node {self._source.node}"
        role = self._source.role
        self._state.emit_corruption(role, generation, self._part, where, expected, found)
        return self._error("checksum does not match", damaged=True)
