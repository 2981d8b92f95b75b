"""Words on a node's health: the site's own command, and the Xids of the driver in the kernel log.

The command's exit status says what the node is good for; the convention is that of NVRx's health
checks, of Meta's gpucm and of prolog scripts: what cannot be asked is no reason to leave a node
out. The table of Xids is short on purpose: a number is in it where its meaning is clear, and
whatever is not in it costs no node.
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

_SHOWN_CHARACTERS = 200
_NOT_FOUND = (126, 127)  # by the shell: not executable, not there
#: what an answer begins with that is none: of a run, a node is good then
NOT_ASKED = "not asked: "
KERNEL_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8192  # the kernel gives no longer ones
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<device>[0-9a-fA-F:.]+)\): (?P<number>\d+)")
# As people and programs quote one.
_QUOTED = re.compile(r"\bXid\b(?: error)?(?: ?\([^)]*\))?:? ?(\d+)", re.IGNORECASE)


class Health(IntEnum):
    """Exit statuses of a health command."""

    GOOD = 0
    SPARE_ONLY = 1  # a role only where no good node is left
    OUT = 2
    UNKNOWN = 3  # a spare is used last, and no role moves


@dataclass(frozen=True)
class Answer:
    """The word of the command, and the last line that it printed."""

    health: Health = Health.GOOD
    text: str = ""


def ask(command: str, limit_seconds: float) -> Answer:
    """Run the command by the shell and return its answer; blocks for ``limit_seconds`` at most.

    A command that is not there means that the node is good; of one that does not end in time, or
    ends with another status, nothing is known. The text says why.
    """
    end = run_by_shell(command, limit_seconds)
    if end.status is None:
        return Answer(Health.UNKNOWN, f"no answer within {limit_seconds:g} s")
    last = end.last_line or "no output"
    if end.status in _NOT_FOUND:
        return Answer(Health.GOOD, f"{NOT_ASKED}{last}")
    if end.status not in set(Health):
        return Answer(Health.UNKNOWN, f"ended with status {end.status}: {last}")
    return Answer(Health(end.status), last)


@dataclass(frozen=True)
class End:
    """The end of a command; ``status`` is None for one that did not in time, and was killed."""

    status: int | None
    last_line: str


def run_by_shell(
    command: str,
    limit_seconds: float,
    given: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> End:
    """Run a command with ``given`` on its standard input; blocks for ``limit_seconds`` at most. It
    needs the run's secret no more than training does."""
    own = dict(os.environ if environment is None else environment)
    own.pop(SECRET_VARIABLE, None)
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
        source.write(given)
        source.seek(0)
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=source,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=own,
            start_new_session=True,
        )
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = child.wait(limit_seconds)
        # What it has started in turn, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4096))
        said = output.read().decode(errors="replace").strip().splitlines()
    return End(status, _shown(said[-1]) if said else "")


# Numbers of the device's own faults by NVIDIA's catalogue of Xid errors: they take a node out. All
# others cost nothing: programs make them (13, 31, 43), or the end of a process (45).
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
    """One Xid of the kernel log: when after the host was booted, bus address of the GPU, number."""

    boot_seconds: float
    device: str
    number: int


def quoted(text: str) -> bool | None:
    """Return whether the Xid that a text names is of a broken device; None where it names none."""
    found = _QUOTED.search(text)
    return int(found[1]) in BROKEN_DEVICE if found else None


def newest_bad(records: Iterable[bytes], since_boot_seconds: float) -> Xid | None:
    """The newest Xid since then that takes its node out; None where there is none. ``records``: of
    the kernel log (``priority,number,microseconds,...;text``).
    """
    bad = None
    for record in records:
        head, _, text = record.decode(errors="replace").partition(";")
        if (found := _XID.search(text)) and int(found["number"]) in BROKEN_DEVICE:
            with contextlib.suppress(IndexError, ValueError):
                at = int(head.split(",")[2]) / 1e6
                if at >= since_boot_seconds:
                    bad = Xid(at, found["device"], int(found["number"]))
    return bad


def read_kernel_log(path: Path = KERNEL_LOG) -> Iterator[bytes]:
    """Yield the records that are in the kernel log now; does not wait for more. Raises OSError
    where it is closed to this user.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            # The oldest one may be overwritten before it was read: the next one is there.
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
    """Now, by the clock of the kernel log, which stands still while the host sleeps."""
    return time.monotonic()


def _shown(line: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in line)[:_SHOWN_CHARACTERS]
