"""The mathematics of parity blocks: k data blocks, m parity blocks, any k of them give all others.

One parity block is the XOR of the data blocks; several are a Reed-Solomon code over bytes as zfec
computes it. Both are linear, so a block is summed up from k others, piece by piece: what byte v of
one of them adds to the wanted one is ``table[v]``, to be XORed. To encode is to want a parity block
when the data blocks are at hand. The tables (256 entries) are taken from zfec itself, by encoding
and decoding every value of a byte with zeros beside it, so they cannot disagree with it. Adding up
pieces instead of collecting blocks first is REFT's way (arXiv 2310.12670).

Blocks may differ in length: what is missing at the end of one counts as zeros. No I/O here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy
from numpy.typing import NDArray

from deadpool_megatron.layout.schemes import MOST_BLOCKS

Buffer: TypeAlias = bytes | bytearray | memoryview
_ALL_BYTES = bytes(range(256))
_NO_BYTES = bytes(256)
_PAIRS = 1 << 16  # looked up at once, within the cache


class Coder:
    """Code for ``data`` (k) data blocks, numbered 0 .. k-1, and ``parities`` (m) parity blocks,
    numbered k .. k+m-1. Immutable: thread-safe.

    Raises ValueError for impossible numbers, ModuleNotFoundError without zfec for m >= 2.
    """

    def __init__(self, data: int, parities: int) -> None:
        if data < 1 or parities < 1 or data + parities > MOST_BLOCKS:
            raise ValueError(f"no code for {data} data and {parities} parity blocks")
        self.data = data
        self.parities = parities
        if parities > 1:
            _zfec()

    def decode(self, blocks: Mapping[int, memoryview], wanted: int, out: memoryview) -> None:
        """Compute bytes of block ``wanted`` from the bytes of ``data`` other blocks at the same
        place (number -> bytes, perhaps shorter than ``out`` where a block ends).

        More than enough blocks are no harm. Raises ValueError when there are too few.
        """
        chosen = tuple(sorted(set(blocks) - {wanted})[: self.data])
        if len(chosen) < self.data or not 0 <= chosen[0] <= chosen[-1] < self.data + self.parities:
            raise ValueError(f"{self.data} blocks are needed, there are {sorted(blocks)}")
        filled = 0  # behind it nothing was computed yet: what lies there is not read, but replaced
        for number, table in zip(chosen, self._tables(chosen, wanted), strict=True):
            piece = blocks[number][: len(out)]
            if table != _NO_BYTES:
                found = memoryview(_translated(table, piece))
                both = min(filled, len(piece))
                _xor(out[:both], found[:both])
                out[both : len(piece)] = found[both:]
                filled = max(filled, len(piece))
        out[filled:] = bytes(len(out) - filled)

    def _tables(self, chosen: tuple[int, ...], wanted: int) -> Sequence[bytes]:
        """Return what the byte of each chosen block contributes to the wanted one."""
        if self.parities == 1:
            return [_ALL_BYTES] * self.data  # the XOR of all k+1 blocks is zero
        return _solve(self.data, self.parities, chosen, wanted)


def _xor(target: memoryview, source: Buffer) -> None:
    into = numpy.frombuffer(target, numpy.uint8)
    numpy.bitwise_xor(into, numpy.frombuffer(source, numpy.uint8), out=into)


def _translated(table: bytes, chunk: Buffer) -> Buffer:
    """Two bytes at a time by numpy, as fast as bytes.translate(), which would keep the interpreter
    lock all the while: commits, closes and all other roles would stand still."""
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
    """For every two neighbouring bytes: either order of bytes in a word has the same."""
    each = numpy.frombuffer(table, numpy.uint8).astype(numpy.uint16)
    return (each[None, :] | each[:, None] << 8).astype(numpy.uint16).reshape(-1)


@cache
def _solve(data: int, parities: int, chosen: tuple[int, ...], wanted: int) -> tuple[bytes, ...]:
    """Per chosen block its table for the wanted one."""
    zfec = _zfec()
    decoder = zfec.Decoder(data, data + parities)
    encoder = zfec.Encoder(data, data + parities)
    # zfec wants each data block that is there at its own place, parity blocks in between.
    spare = [number for number in chosen if number >= data]
    order = [i if i in chosen else spare.pop() for i in range(data)]
    tables = []
    for number in chosen:
        given = [_ALL_BYTES if other == number else _NO_BYTES for other in order]
        found = decoder.decode(given, order)
        tables.append(
            bytes(encoder.encode(found, [wanted])[0] if wanted >= data else found[wanted])
        )
    return tuple(tables)


def _zfec() -> Any:
    """Not at the top: a run with one parity block works without it."""
    import zfec

    return zfec
