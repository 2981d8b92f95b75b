"""Lossless halves of fp32 masters whose bfloat16 rounding is known elsewhere. Pure.

Every data-parallel peer has the model's bfloat16 weights, which are the masters rounded to nearest,
ties to even. So of a master only the low 16 bits have to travel. The high ones are those of the
rounded value, less one where it was rounded up: as numbers, the master is the weight shifted up
plus the low half read with its sign. A tie (low half 0x8000) does not tell which way it went: it is
taken for one that went up. Those that went down, one value in 2^17, are exceptions and travel
whole, and so is every NaN, whose rounding is each backend's own affair.

Proven over all 2^32 bit patterns (tests/vault/test_compaction.py). Arrays are numpy's, of the
machine's byte order; a *word* is the bit pattern of a master, a *half* that of a weight or of a low
half.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deadpool_megatron.layout.bases import WEIGHT_BYTES, Masters

Words = NDArray[np.uint32]
Halves = NDArray[np.uint16]

_HALF = np.uint16(0x8000)
# Values at a time: what is worked on stays in the cache of a core.
_BLOCK = 1 << 16
# Beyond so many exceptions the part travels whole: 1 value in 256, for it is 1 in 2^17 as a rule.
_MOST_EXCEPTIONS_SHARE = 256
_FREE_EXCEPTIONS = 64
EXCEPTION_BYTES = 8


def split(masters: Words) -> tuple[Halves, NDArray[np.intp]]:
    """The low halves, and the places of the exceptions (ascending)."""
    low = masters.astype(np.uint16)  # keeps the low half
    candidates = np.flatnonzero((low == _HALF) | np.isnan(masters.view(np.float32)))
    if not candidates.size:
        return low, candidates
    words = masters[candidates]
    tie_went_down = (words & np.uint32(0x1_FFFF)) == np.uint32(0x8000)
    return low, candidates[tie_went_down | np.isnan(words.view(np.float32))]


def join(low: Halves, model: Halves) -> Words:
    """Inverse of :func:`split`, but for the exceptions. ``model``: the weights."""
    words = model.astype(np.uint32)
    np.left_shift(words, 16, out=words)
    signed = low.view(np.int16).astype(np.int32)
    # Wraps round in 32 bits, as rounding up does at the end of an exponent.
    np.add(words.view(np.int32), signed, out=words.view(np.int32))
    return words


@dataclass(frozen=True)
class Exceptions:
    """``places``: numbers among all masters of the part, ascending; ``values``: their words."""

    places: Words
    values: Words


def most_exceptions(count: int) -> int:
    """How many of ``count`` masters may be exceptions."""
    return _FREE_EXCEPTIONS + count // _MOST_EXCEPTIONS_SHARE


class Splitter:
    """Makes the low halves of a part piece by piece, and collects its exceptions."""

    def __init__(self, part: memoryview, masters: Masters) -> None:
        """``part``: bytes of the part; ``masters`` has been checked against their number."""
        self._part = part
        self._masters = masters
        self._most = most_exceptions(masters.count)
        self._places: list[NDArray[np.uint32]] = []
        self._values: list[Words] = []
        self._found = 0

    def pieces(self) -> Iterator[memoryview]:
        """The bytes of the low halves, in order."""
        reached = 0
        for offset, count, _ in self._masters.runs:
            words = np.frombuffer(self._part, np.uint32, count, offset)
            for start in range(0, count, _BLOCK):
                low, places = split(words[start : start + _BLOCK])
                self._keep(words, places + start, reached)
                yield low.data.cast("B")
            reached += count

    def _keep(self, words: Words, places: NDArray[np.intp], reached: int) -> None:
        self._found += places.size
        if places.size and self._found <= self._most:
            self._places.append((places + reached).astype(np.uint32))
            self._values.append(words[places])

    @property
    def exceptions(self) -> Exceptions | None:
        """After the last piece; None when they are too many."""
        if self._found > self._most:
            return None
        none = np.empty(0, np.uint32)
        return Exceptions(
            np.concatenate([none, *self._places]), np.concatenate([none, *self._values])
        )


def low_places(masters: Masters) -> Iterator[tuple[int, int]]:
    """(begin, end) in a part where the low halves wait for :func:`join_in_place`, in order: the
    first half of each run."""
    for offset, count, _ in masters.runs:
        yield offset, offset + WEIGHT_BYTES * count


def join_in_place(
    part: memoryview, masters: Masters, base: memoryview, exceptions: Exceptions
) -> None:
    """Turn the low halves that wait in ``part`` into the masters; ``base``: bytes of the weights.

    Whatever ``base`` really holds, the caller compares the checksum of the part with the owner's.
    Raises ValueError or IndexError where lengths or places do not fit.
    """
    for offset, count, at in masters.runs:
        words = np.frombuffer(part, np.uint32, count, offset)
        low = np.frombuffer(part, np.uint16, count, offset)
        model = np.frombuffer(base, np.uint16, count, at)
        # From the end: a block is written where halves lay that have been used.
        for start in reversed(range(0, count, _BLOCK)):
            end = min(start + _BLOCK, count)
            words[start:end] = join(low[start:end].copy(), model[start:end])
    _put_exceptions(part, masters, exceptions)


def _put_exceptions(part: memoryview, masters: Masters, exceptions: Exceptions) -> None:
    if not exceptions.places.size:
        return
    ends = np.cumsum([count for _, count, _ in masters.runs])
    if int(exceptions.places.max()) >= masters.count:
        raise ValueError("an exception behind the last master")
    runs = np.searchsorted(ends, exceptions.places, side="right")
    for number in np.unique(runs):
        offset, count, _ = masters.runs[number]
        chosen = runs == number
        words = np.frombuffer(part, np.uint32, count, offset)
        words[exceptions.places[chosen] - (int(ends[number]) - count)] = exceptions.values[chosen]
