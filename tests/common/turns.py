"""In which order tests run that may not all have their turn. Pure."""

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turn(
    items: Sequence[T], may_be_left_out: Callable[[T], bool], room: Callable[[T], Hashable], by: str
) -> list[T]:
    """The items that have to run, then the others, room by room. With which room these begin
    follows from ``by``: whoever is left out in one session comes first in another.
    """
    certain = [item for item in items if not may_be_left_out(item)]
    others = [item for item in items if may_be_left_out(item)]
    rooms = list(dict.fromkeys(room(item) for item in others))
    if not rooms:
        return certain
    first = int.from_bytes(hashlib.sha256(by.encode()).digest()[:8], "big") % len(rooms)
    turn = {room: (number - first) % len(rooms) for number, room in enumerate(rooms)}
    return certain + sorted(others, key=lambda item: turn[room(item)])
