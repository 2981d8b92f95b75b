"""Checks a node's health, by the site's own command and the driver's Xids in the kernel log.

The exit status of the command determines the use of the node. As with NVRx's health checks, Meta's
gpucm and prolog scripts, a check that cannot run excludes no node. The table of Xids has only
numbers with a clear meaning, and no other number excludes a node.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from deadpool_megatron.wire.auth import ENVIRONMENT_NAME as SECRET_VARIABLE

_MAX_CHARACTERS = 200
_NOT_FOUND = (126, 127)  # statuses of the shell: not executable, not found
#: start of the text for a command that could not run, in which case the node counts as good
NOT_CHECKED = "not asked: "
KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # the kernel's limit of a record
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<number>\d+)")
# The forms in which people and programs quote an Xid.
_QUOTED_XID = re.compile(r"\bXid\b(?: error)?(?: ?\([^)]*\))?:? ?(\d+)", re.IGNORECASE)


class Health(IntEnum):
    """The exit status of a health command."""

    GOOD = 0
    SPARE_ONLY = 1  # the node gets a role only if no good node is left
    OUT = 2
    UNKNOWN = 3  # a spare node is used last; a node with roles keeps them


@dataclass(frozen=True)
class HealthResult:
    """The result of the command. ``text``: the last line that it printed, or the reason."""

    health: Health = Health.GOOD
    text: str = ""


def check_health(command: str, limit_seconds: float) -> HealthResult:
    """Run the command in a shell and return its result. Blocks for ``limit_seconds`` at most.

    If the command does not exist, the node is good. If the command does not end in time, or ends
    with a status that has no meaning, the health is unknown.
    """
    end = run_in_shell(command, limit_seconds)
    if end.status is None:
        return HealthResult(Health.UNKNOWN, f"no answer within {limit_seconds:g} s")
    text = end.last_line or "no output"
    if end.status in _NOT_FOUND:
        return HealthResult(Health.GOOD, f"{NOT_CHECKED}{text}")
    if end.status not in set(Health):
        return HealthResult(Health.UNKNOWN, f"ended with status {end.status}: {text}")
    return HealthResult(Health(end.status), text)


@dataclass(frozen=True)
class CommandEnd:
    """The end of a command. ``status``: None if the command did not end in time and was killed."""

    status: int | None
    last_line: str


def run_in_shell(
    command: str,
    limit_seconds: float,
    text: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> CommandEnd:
    """Run a command with ``text`` on its standard input. Blocks for ``limit_seconds`` at most. The
    command does not get the run's secret."""
    variables = dict(os.environ if environment is None else environment)
    variables.pop(SECRET_VARIABLE, None)
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
        source.write(text)
        source.seek(0)
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=source,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(limit_seconds)
        # End the processes that the command has started, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4096))
        lines = output.read().decode(errors="replace").strip().splitlines()
    return CommandEnd(status, _printable(lines[-1]) if lines else "")


# The Xids that NVIDIA's catalogue explains by a fault of the device; they exclude a node. Other
# Xids come from programs (13, 31, 43), or from the end of a process (45).
BROKEN_DEVICE = frozenset({
    48,  # double bit ECC error
    63,  # a row is to be remapped: the device wants a reset
    64,  # a row could not be remapped
    74,  # NVLink error
    79,  # the GPU has fallen off the bus
    94,  # contained ECC error
    95,  # uncontained ECC error
})  # fmt: skip


@dataclass(frozen=True)
class Xid:
    """An Xid of the kernel log: seconds since the boot, bus address of the GPU, number."""

    boot_seconds: float
    device: str
    number: int


def quotes_broken_device(text: str) -> bool | None:
    """Return whether a text names the Xid of a broken device; None if it names no Xid."""
    match = _QUOTED_XID.search(text)
    return int(match[1]) in BROKEN_DEVICE if match else None


def newest_broken(records: Iterable[bytes], since_boot_seconds: float) -> Xid | None:
    """Return the newest Xid of a broken device since a time, or None. ``records``: the records of
    the kernel log (``priority,number,microseconds,...;text``).
    """
    newest = None
    for record in records:
        head, _, text = record.decode(errors="replace").partition(";")
        if (match := _XID.search(text)) and int(match["number"]) in BROKEN_DEVICE:
            with contextlib.suppress(IndexError, ValueError):
                at = int(head.split(",")[2]) / 1e6
                if at >= since_boot_seconds:
                    newest = Xid(at, match["device"], int(match["number"]))
    return newest


def read_kernel_log(path: Path = KERNEL_LOG) -> Iterator[bytes]:
    """Yield the present records of the kernel log, without waiting for more. Raises OSError if
    this user may not read it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            # If a record was overwritten before it was read, the next read returns a later record.
            with contextlib.suppress(BrokenPipeError):
                record = os.read(handle, _RECORD_BYTES)
                if not record:
                    return
                yield record
    except BlockingIOError:
        return
    finally:
        os.close(handle)


def boot_seconds() -> float:
    """Return the seconds since the boot by the clock of the kernel log, which stops while the host
    sleeps."""
    return time.monotonic()


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in line)[:_MAX_CHARACTERS]
