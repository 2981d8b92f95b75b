"""What the driver's Xid numbers in the kernel log say about the GPUs of this host.

The table is short on purpose: a number is in it where its meaning is clear. Whatever is not in it
costs no node.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # the kernel gives no longer ones
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<number>\d+)")
# As people and programs quote one.
_QUOTED = re.compile(r"\bXid\b(?: error)?(?: ?\([^)]*\))?:? ?(\d+)", re.IGNORECASE)


class Action(Enum):
    """What an Xid costs its node."""

    KEEP = "the program's own fault, or harmless"
    LEAVE_OUT = "the device's fault: the node gets no role"


# Numbers by NVIDIA's catalogue of Xid errors.
ACTIONS = {
    13: Action.KEEP,  # exception of the graphics engine: an index out of bounds, mostly
    31: Action.KEEP,  # page fault of the GPU: an address of the program's
    43: Action.KEEP,  # the program was stopped for its own fault
    45: Action.KEEP,  # clean-up of channels, as when a process is killed
    48: Action.LEAVE_OUT,  # double bit ECC error
    63: Action.LEAVE_OUT,  # a row is to be remapped: the device wants a reset
    64: Action.LEAVE_OUT,  # a row could not be remapped
    74: Action.LEAVE_OUT,  # NVLink error
    79: Action.LEAVE_OUT,  # the GPU has fallen off the bus
    94: Action.LEAVE_OUT,  # contained ECC error
    95: Action.LEAVE_OUT,  # uncontained ECC error
}


@dataclass(frozen=True)
class LogLine:
    """A line of the kernel log; seconds since the host was booted."""

    boot_seconds: float
    text: str


@dataclass(frozen=True)
class Xid:
    """One Xid: its number and the bus address of its GPU."""

    boot_seconds: float
    device: str
    number: int

    @property
    def action(self) -> Action:
        """What it costs."""
        return ACTIONS.get(self.number, Action.KEEP)


def find_xids(lines: Iterable[LogLine]) -> Iterator[Xid]:
    """The Xids among lines of the kernel log, in their order."""
    for line in lines:
        if found := _XID.search(line.text):
            yield Xid(line.boot_seconds, found["device"], int(found["number"]))


def quoted(text: str) -> Action | None:
    """What the Xid that a text names costs; None where it names none."""
    found = _QUOTED.search(text)
    return ACTIONS.get(int(found[1]), Action.KEEP) if found else None


def newest_bad(lines: Iterable[LogLine], since_boot_seconds: float) -> Xid | None:
    """The newest Xid since then that takes its node out; None where there is none."""
    bad = None
    for xid in find_xids(lines):
        if xid.boot_seconds >= since_boot_seconds and xid.action is Action.LEAVE_OUT:
            bad = xid
    return bad


def parse_record(record: bytes) -> LogLine | None:
    """A record of the kernel log (``priority,number,microseconds,...;text``); None for another."""
    head, _, rest = record.decode(errors="replace").partition(";")
    with contextlib.suppress(IndexError, ValueError):
        return LogLine(int(head.split(",")[2]) / 1e6, rest.partition("\n")[0])
    return None


def read_kernel_log(path: Path = KERNEL_LOG) -> Iterator[LogLine]:
    """What is in the kernel log now; does not wait for more. Raises OSError where it is closed to
    this user.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        yield from _lines(lambda: os.read(handle, _RECORD_BYTES))
    finally:
        os.close(handle)


def boot_seconds() -> float:
    """Now, by the clock of the kernel log, which stands still while the host sleeps."""
    return time.monotonic()


def _lines(read_record: Callable[[], bytes]) -> Iterator[LogLine]:
    while True:
        try:
            record = read_record()
        except BlockingIOError:
            return
        except BrokenPipeError:
            continue  # overwritten before it was read: the next one is there
        if not record:
            return
        if line := parse_record(record):
            yield line
