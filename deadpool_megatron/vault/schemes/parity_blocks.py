"""Coded blocks on their way to where a part is computed from them, each by a thread of its own.

A block comes from another vault's memory or from a file of a dump. Its bytes are checked as they
come against the checksum that its place keeps of them; the thread that decodes learns of it at the
end of the block.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import xxhash

from deadpool_megatron.layout.parity_groups import MEMBERS
from deadpool_megatron.layout.records import EpochRecord, Generation, Source
from deadpool_megatron.vault.core import fetch
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.net.transport import Channel
from deadpool_megatron.vault.shm.segment import PartState, Segment

_MOST_SMALL_BYTES = 16 << 20
_PIECES = 2  # of each block: one is decoded while the other one arrives
_NOTHING = memoryview(b"")

# A new connection to the vault of a node; raises OSError, WireError, or VaultError for no node.
Dial = Callable[[int], Channel]


class BlockError(Exception):
    """A block did not come. ``final``: nor will it from this place; ``damaged``: it came wrong;
    ``members``: what did not come was what it has been computed from."""

    def __init__(
        self,
        number: int,
        source: Source | None,
        why: str,
        *,
        final: bool = False,
        damaged: bool = False,
        members: bool = False,
    ) -> None:
        super().__init__(why)
        self.number, self.source = number, source
        self.final, self.damaged, self.members = final, damaged, members


class Supply(ABC):
    """One part from one place. One thread, but :meth:`cut`. Methods raise VaultError when the place
    cannot give it, and OSError or WireError when it could not be asked.
    """

    @property
    @abstractmethod
    def where(self) -> str:
        """The place, for people."""

    @abstractmethod
    def begin(self) -> tuple[int, int]:
        """Size in bytes and checksum of the part, whose bytes follow."""

    @abstractmethod
    def read(self, target: memoryview) -> None:
        """Fill ``target`` with the next bytes."""

    @abstractmethod
    def cut(self) -> None:
        """Make the other methods fail soon; from any thread."""

    @abstractmethod
    def close(self) -> None:
        """Give the resources back."""


# The supply of a part from a place.
Supplier = Callable[[Source, str], Supply]


class VaultSupply(Supply):
    """A part in the memory of another vault, or of this one, by a connection of its own."""

    def __init__(
        self, state: VaultState, record: EpochRecord, dial: Dial, source: Source, part: str
    ) -> None:
        self._state = state
        self._record = record
        self._dial = dial
        self._source = source
        self._part = part
        self._channel: Channel | None = None
        self._over = False

    @property
    def where(self) -> str:
        return f"from node {self._source.node}"

    def begin(self) -> tuple[int, int]:
        state, record = self._state, self._record
        self._channel = channel = self._dial(self._source.node)
        if self._over or not state.is_open(record.epoch):
            raise ConnectionError("the epoch was closed while connecting")
        generation = record.restore.generation
        (part,) = fetch.ask(
            channel, state.node, record.epoch, self._source, generation, [self._part]
        )
        return part

    def read(self, target: memoryview) -> None:
        assert self._channel is not None, "begin() comes first"
        self._channel.receive_bulk(target)

    def cut(self) -> None:
        self._over = True
        channel = self._channel
        if channel is not None:
            channel.shutdown()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


class FileSupply(Supply):
    """A part in a file of a dump."""

    def __init__(self, path: Path, part: str) -> None:
        self._path = path
        self._part = part
        self._dumped: Segment | None = None
        self._position = 0

    @property
    def where(self) -> str:
        return str(self._path)

    def begin(self) -> tuple[int, int]:
        self._dumped = Segment.open(self._path, writable=False)
        entry = self._dumped.entry(0, self._part)
        if entry.state is not PartState.SEALED:
            raise VaultError("not in the file")
        return entry.nbytes, entry.checksum

    def read(self, target: memoryview) -> None:
        assert self._dumped is not None, "begin() comes first"
        self._dumped.read_into(0, self._part, self._position, target)
        self._position += len(target)

    def cut(self) -> None:
        """A file keeps nobody waiting."""

    def close(self) -> None:
        self._dumped = None


class Arrival(ABC):
    """A block that comes in pieces, for the thread that computes another one from it."""

    def __init__(
        self, state: VaultState, number: int, source: Source, generation: Generation, part: str
    ) -> None:
        self.number = number
        self._state = state
        self._source = source
        self._generation = generation
        self._part = part

    @abstractmethod
    def take(self, count: int) -> memoryview:
        """The next ``count`` bytes, fewer at the end of the block; valid until :meth:`give_back`.
        Pieces have to be taken in the size in which they come. Raises BlockError."""

    @abstractmethod
    def give_back(self) -> None:
        """The bytes of :meth:`take` have been used."""

    @abstractmethod
    def finish(self) -> None:
        """Wait for the rest of the block, and for its checksum. Raises BlockError."""

    def _check(self, found: int, expected: int, where: str) -> None:
        if found == expected:
            return
        self._state.reports.counters["corruption"] += 1
        self._state.reports.corruption(
            self._source.role, self._generation, self._part, where, expected, found
        )
        raise self._error("checksum does not match", damaged=True)

    def _error(self, why: str, *, final: bool = False, damaged: bool = False) -> BlockError:
        members = self._part == MEMBERS
        return BlockError(
            self.number, self._source, why, final=final, damaged=damaged, members=members
        )

    def _translated(self, error: Exception) -> BlockError:
        if isinstance(error, BlockError):
            return error
        if isinstance(error, VaultError):
            return self._error(str(error), final=True)
        return self._error(f"{type(error).__name__}: {error}")


class Block(Arrival, threading.Thread):
    """Receives one block in pieces of ``chunk_bytes``.

    ``wanted``: bytes and checksum that it must have; None for parity, which nobody else vouches
    for.
    """

    def __init__(
        self,
        state: VaultState,
        supply: Supply,
        number: int,
        source: Source,
        generation: Generation,
        part: str,
        wanted: tuple[int, int] | None = None,
    ) -> None:
        name = f"block-{source.role}-from-{source.node}"
        threading.Thread.__init__(self, name=name, daemon=True)
        Arrival.__init__(self, state, number, source, generation, part)
        self._supply = supply
        self._wanted = wanted
        self._over = threading.Event()
        # A piece and how many of its bytes have come; None at the end of the block.
        self._full: queue.SimpleQueue[tuple[bytearray, int] | BlockError | None] = (
            queue.SimpleQueue()
        )
        self._free: queue.SimpleQueue[bytearray | None] = queue.SimpleQueue()
        self._piece: bytearray | None = None
        self._ended = False

    def begin(self) -> None:
        """Start to receive. Raises BlockError where the host has no thread left at the moment."""
        try:
            self.start()
        except RuntimeError as error:
            raise self._translated(error) from error

    def cut(self) -> None:
        """End it, from any thread."""
        self._over.set()
        self._free.put(None)
        self._supply.cut()

    # For the thread that decodes.

    def take(self, count: int) -> memoryview:
        filled = self._next()
        return memoryview(self._piece)[: min(count, filled)] if self._piece else _NOTHING

    def give_back(self) -> None:
        if self._piece is not None:
            self._free.put(self._piece)
            self._piece = None

    def finish(self) -> None:
        while not self._ended:
            self._next()
            self.give_back()

    def _next(self) -> int:
        """Return how many bytes have come in the next piece; 0 behind the end."""
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

    # The thread that receives.

    def run(self) -> None:
        """Until the block is here, or has failed, or is not wanted any more."""
        try:
            self._receive()
            self._full.put(None)
        except (BlockError, VaultError, *fetch.UNREACHABLE) as error:
            self._full.put(self._translated(error))
        finally:
            self._supply.close()

    def small(self) -> bytes:
        """The whole part, which has to be a small one, in the calling thread instead. Raises
        BlockError."""
        try:
            nbytes, expected = self._supply.begin()
            if not 0 <= nbytes <= _MOST_SMALL_BYTES:
                raise VaultError(f"{self._part} of {nbytes} bytes")
            content = bytearray(nbytes)
            self._supply.read(memoryview(content))
            self._check(xxhash.xxh3_64_intdigest(content), expected, self._supply.where)
        except (BlockError, VaultError, *fetch.UNREACHABLE) as error:
            raise self._translated(error) from error
        finally:
            self._supply.close()
        return bytes(content)

    def _receive(self) -> None:
        nbytes, expected = self._supply.begin()
        if self._wanted not in (None, (nbytes, expected)):
            raise VaultError("holds other bytes than the parity was computed from")
        size = self._state.settings.chunk_bytes
        for _ in range(_PIECES):
            self._free.put(bytearray(size))
        digest = xxhash.xxh3_64()
        for start in range(0, nbytes, size):
            piece = self._free.get()
            if piece is None or self._over.is_set():
                raise ConnectionError("is not wanted any more")
            filled = min(size, nbytes - start)
            self._supply.read(memoryview(piece)[:filled])
            digest.update(memoryview(piece)[:filled])
            self._full.put((piece, filled))
        self._check(digest.intdigest(), expected, self._supply.where)
