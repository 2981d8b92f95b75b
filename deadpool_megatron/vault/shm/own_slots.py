"""The segment that one member incarnation writes: its memory may be made before there is a role.

A process that waits for a role parks slots; its vault gives them the name of the role, or makes
others. So there is one who names them, whoever of the two needs them first.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from deadpool_megatron.layout.records import RoleLayout, Seat
from deadpool_megatron.vault.errors import SegmentError
from deadpool_megatron.vault.memory import Budget
from deadpool_megatron.vault.shm.segment import Segment, read_description


def park(directory: Path, layout: RoleLayout, seat: Seat, budget: Budget) -> Segment:
    """Make the slots of the process on ``seat``, which waits for a role, most likely one with this
    ``layout``: to fill gigabytes of memory with zeros takes seconds that a recovery need not have.

    Raises NoRoom.
    """
    for left in _parked_on_place(directory, seat):
        left.unlink(missing_ok=True)
    return _create(directory / f"{_parked(seat)}{os.getpid()}", layout, seat, budget)


def unpark(directory: Path, seat: Seat) -> None:
    """Take away what the process on ``seat`` has parked, if it has not become a role's.

    Its memory first: the process may have it mapped still, but does not look into it any more.
    """
    for path in directory.glob(f"{_parked(seat)}*"):
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
        path.unlink(missing_ok=True)


def make_own(path: Path, layout: RoleLayout, seat: Seat, budget: Budget) -> None:
    """Make ``path``, the segment of a role: of what its process has parked, if that is laid out as
    the role needs it, else of new memory. By the vault alone. Raises NoRoom."""
    for left in _parked_on_place(path.parent, seat):
        if not left.name.lstrip(".").startswith(_parked(seat).lstrip(".")):
            left.unlink(missing_ok=True)  # its process is gone: this one has come after it
    for parked in path.parent.glob(f"{_parked(seat)}*"):
        with contextlib.suppress(SegmentError, FileNotFoundError):
            if _open_parked(parked, seat, budget).become(path, layout):
                return
    unpark(path.parent, seat)
    _create(path, layout, seat, budget)


def _open_parked(path: Path, seat: Seat, budget: Budget) -> Segment:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        layout, geometry = read_description(file, path, seat)
    except BaseException:
        os.close(file)
        raise
    return Segment(path, layout, seat, file, geometry, budget=budget)


def _parked_on_place(directory: Path, seat: Seat) -> list[Path]:
    """Return what any process on this place has parked, and what one that was killed has not
    finished."""
    place = f"parked-{seat.node}.{seat.slot}.*"
    return [*directory.glob(f".{place}"), *directory.glob(f"..{place}")]


def _parked(seat: Seat) -> str:
    """Return how the name begins; the process that makes it comes last."""
    return f".parked-{seat.node}.{seat.slot}.{seat.incarnation}.seg."


def _create(path: Path, layout: RoleLayout, seat: Seat, budget: Budget) -> Segment:
    names = [part.name for part in layout.parts]
    return Segment.create(path, layout, seat, names, budget=budget)
