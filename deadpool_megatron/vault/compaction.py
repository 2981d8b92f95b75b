"""Lossless halves of fp32 master weights whose bfloat16 rounding is known elsewhere.

Every data-parallel peer has the model's bfloat16 weights, which are the masters rounded to nearest,
ties to even. So of a master only the low 16 bits have to travel: the high ones are those of the
rounded value, less one where it was rounded up. A tie (low bits 0x8000) does not tell which way it
went, and a NaN becomes another one: these are listed with their whole value (about one value in
2^17 is a tie that went up).

Pure; arrays are numpy's. All functions work on pieces of any length.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Halves = NDArray[np.uint16]

_HALF = np.uint16(0x8000)


@dataclass(frozen=True)
class Compact:
    """``low``: the low halves, in order. ``places``, ``values``: the exceptions, ascending."""

    low: Halves
    places: Words
    values: Words

    @property
    def nbytes(self) -> int:
        """What travels."""
        return self.low.nbytes + self.places.nbytes + self.values.nbytes


def rounded(masters: Words) -> Halves:
    """The bit patterns that a cast to bfloat16 gives (torch: c10/util/BFloat16.h): round to nearest
    even, every NaN becomes 0x7fc0."""
    high = masters >> 16
    up = (masters + (np.uint32(0x7FFF) + (high & np.uint32(1)))) >> 16
    nan = (masters & np.uint32(0x7FFF_FFFF)) > np.uint32(0x7F80_0000)
    return np.where(nan, np.uint32(0x7FC0), up).astype(np.uint16)


def compact(masters: Words) -> Compact:
    """What has to travel of ``masters`` (bit patterns, shape (n,), n < 2^32)."""
    low = masters.astype(np.uint16)  # the low half
    wrong = np.flatnonzero(_combined(low, rounded(masters)) != masters)
    return Compact(low, wrong.astype(np.uint32), masters[wrong])


def expand(parts: Compact, model: Halves) -> Words:
    """Inverse of :func:`compact`; ``model``: bit patterns of the bfloat16 weights, shape (n,).

    Whatever ``model`` really holds (a backend that rounds otherwise, another generation), the
    caller compares the checksum of the result with the owner's.
    """
    masters = _combined(parts.low, model)
    masters[parts.places] = parts.values
    return masters


def _combined(low: Halves, model: Halves) -> Words:
    high = model - (low >= _HALF)  # uint16: wraps as the addition above does
    return (high.astype(np.uint32) << np.uint32(16)) | low
