"""The smallest part of something that still fails. Pure."""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(parts: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Those that are left when none of them can go any more. All of them together fail.

    Halves go first, then quarters and so on: where few matter, few tries suffice.
    """
    kept, size = list(parts), max(1, len(parts) // 2)
    while kept:
        before = len(kept)
        for start in reversed(range(0, len(kept), size)):
            rest = kept[:start] + kept[start + size :]
            if fails(rest):
                kept = rest
        if size == 1 and len(kept) == before:
            break
        size = max(1, size // 2)
    return kept
