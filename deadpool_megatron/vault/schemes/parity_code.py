"""The mathematics of parity blocks: k data blocks, m parity blocks, any k of them give all others.

A single parity block is the XOR of the data blocks; several are a Reed-Solomon code over bytes, as
computed by zfec. Both are linear, so a block is the sum of k others, piece by piece: byte v of a
given block adds ``table[v]`` to the wanted block, by XOR. Encoding computes a parity block from the
data blocks. The tables (256 entries) are computed by zfec: it encodes and decodes every value of a
byte together with zeros. Adding pieces as they arrive, instead of collecting blocks first, follows
REFT (arXiv 2310.12670).

Blocks may differ in length: missing bytes at the end count as zeros. No I/O here.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from deadpool_megatron.layout.schemes import MAX_BLOCKS

Buffer: TypeAlias = bytes | bytearray | memoryview
_ALL_BYTES = bytes(range(256))
_NO_BYTES = bytes(256)
_PAIRS = 1 << 16  # pairs of bytes that are looked up at once, few enough for the processor's cache


class Coder:
    """Code for ``data`` (k) data blocks, numbered 0 .. k-1, and ``parities`` (m) parity blocks,
    numbered k .. k+m-1. Immutable: thread-safe.

    Raises ValueError for impossible numbers, ModuleNotFoundError without zfec for m >= 2.
    """

    def __init__(self, data: int, parities: int) -> None:
        if data < 1 or parities < 1 or data + parities > MAX_BLOCKS:
            raise ValueError(f"no code for {data} data and {parities} parity blocks")
        self.data = data
        self.parities = parities
        if parities > 1:
            _zfec()

    def begin(self, numbers: Collection[int], wanted: int, out: memoryview) -> Combination:
        """Return the combination that computes block ``wanted`` in ``out``, from the first k of the
        blocks ``numbers``.

        Raises ValueError when there are too few blocks.
        """
        chosen = tuple(sorted({*numbers} - {wanted})[: self.data])
        if len(chosen) < self.data or not 0 <= chosen[0] <= chosen[-1] < self.data + self.parities:
            raise ValueError(f"{self.data} blocks are needed, there are {sorted(numbers)}")
        if self.parities == 1:  # the XOR of all k+1 blocks is zero
            return Combination(dict.fromkeys(chosen, _ALL_BYTES), out)
        return Combination(_solve(self.data, self.parities, chosen, wanted), out)


class Combination:
    """The sum that gives a wanted block; it overwrites the block's memory. Thread-safe: the blocks
    to add arrive in any order and in parallel, each from its first byte on; missing bytes count as
    zeros."""

    def __init__(self, tables: Mapping[int, bytes], out: memoryview) -> None:
        self._tables = tables
        self._out = out
        self._filled = 0  # bytes from here on are old content: they are replaced, not added to
        self._is_over = False
        self._lock = threading.Lock()

    def add(self, number: int, start: int, piece: memoryview) -> bool:
        """Add the bytes of block ``number`` from ``start`` on; False after :meth:`give_up`."""
        piece = piece[: max(0, len(self._out) - start)]
        share = memoryview(_translated(self._tables[number], piece))
        with self._lock:
            if self._is_over:
                return False
            both = max(0, min(self._filled - start, len(share)))
            _xor(self._out[start : start + both], share[:both])
            self._out[start + both : start + len(share)] = share[both:]
            self._filled = max(self._filled, start + len(share))
        return True

    def give_up(self) -> None:
        """End all writes; none follows after the return."""
        with self._lock:
            self._is_over = True


def _xor(target: memoryview, source: Buffer) -> None:
    into = numpy.frombuffer(target, numpy.uint8)
    numpy.bitwise_xor(into, numpy.frombuffer(source, numpy.uint8), out=into)


def _translated(table: bytes, chunk: Buffer) -> Buffer:
    """Translate two bytes at a time by numpy: as fast as bytes.translate(), which would hold the
    interpreter lock and so block commits, closes and all other roles."""
    if table == _ALL_BYTES:
        return chunk
    even = len(chunk) // 2 * 2
    pairs = numpy.frombuffer(chunk, numpy.uint16, even // 2)
    found = numpy.empty(len(chunk), numpy.uint8)
    out = found[:even].view(numpy.uint16)
    for start in range(0, len(pairs), _PAIRS):
        part = slice(start, start + _PAIRS)
        numpy.take(_pair_table(table), pairs[part], out=out[part], mode="clip")
    if even < len(chunk):
        found[-1] = table[chunk[-1]]
    return found.data


@cache
def _pair_table(table: bytes) -> NDArray[numpy.uint16]:
    """Return the table for pairs of bytes; it is the same for either byte order."""
    each = numpy.frombuffer(table, numpy.uint8).astype(numpy.uint16)
    return (each[None, :] | each[:, None] << 8).astype(numpy.uint16).reshape(-1)


@cache
def _solve(data: int, parities: int, chosen: tuple[int, ...], wanted: int) -> Mapping[int, bytes]:
    """Return chosen block -> its table for the wanted block."""
    zfec = _zfec()
    decoder = zfec.Decoder(data, data + parities)
    encoder = zfec.Encoder(data, data + parities)
    # zfec expects each chosen data block at its own place, and parity blocks at the other places.
    spare = [number for number in chosen if number >= data]
    order = [i if i in chosen else spare.pop() for i in range(data)]
    tables = {}
    for number in chosen:
        given = [_ALL_BYTES if other == number else _NO_BYTES for other in order]
        found = decoder.decode(given, order)
        table = encoder.encode(found, [wanted])[0] if wanted >= data else found[wanted]
        tables[number] = bytes(table)
    return tables


def _zfec() -> Any:
    """Import zfec only if it is needed: a run with one parity block works without it."""
    import zfec

    return zfec
