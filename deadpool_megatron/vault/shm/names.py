"""File names of segments: each says whose bytes the file holds."""

from __future__ import annotations

import re

from deadpool_megatron.layout.records import Seat
from deadpool_megatron.vault.errors import SegmentError


def own_name(role: int, seat: Seat) -> str:
    """File name of the segment that one member incarnation writes."""
    return f"own-{role}-{seat.node}.{seat.slot}.{seat.incarnation}.seg"


def copy_name(role: int) -> str:
    """File name of the segment in which a vault keeps copies of a role that is seated elsewhere, or
    the one that a role which is seated here is recomputed from."""
    return f"copy-{role}.seg"


def steps_name(role: int) -> str:
    """File name of the segment in which a vault keeps the steps that lead on from these copies."""
    return f"steps-{role}.seg"


def dump_name(role: int, node: int) -> str:
    """File name of what the vault of ``node`` dumped of a role."""
    return f"dump-{role}-{node}.seg"


_NAME = re.compile(r"(?:own-(\d+)-(\d+)\.(\d+)\.(\d+)|(?:copy|steps)-(\d+)|dump-(\d+)-\d+)\.seg")


def parse_name(name: str) -> tuple[int, Seat | None]:
    """``(role, seat)``; no seat for a copy. Raises SegmentError for any other name."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise SegmentError(f"{name!r} is not the name of a segment")
    if match[1] is None:
        return int(match[5] or match[6]), None
    return int(match[1]), Seat(int(match[2]), int(match[3]), int(match[4]))
