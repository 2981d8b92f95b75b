"""The order of tests of which some may be left out. Pure."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(
    items: Sequence[T], may_be_left_out: Callable[[T], bool], file: Callable[[T], Hashable], by: str
) -> list[T]:
    """Return the items that have to run, then the others, file by file. ``by`` decides the file
    with which they begin: items that one session leaves out come first in another.
    """
    certain = [item for item in items if not may_be_left_out(item)]
    others = [item for item in items if may_be_left_out(item)]
    files = list(dict.fromkeys(file(item) for item in others))
    if not files:
        return certain
    first = int.from_bytes(hashlib.sha256(by.encode()).digest()[:8], "big") % len(files)
    turn = {name: (number - first) % len(files) for number, name in enumerate(files)}
    return certain + sorted(others, key=lambda item: turn[file(item)])
