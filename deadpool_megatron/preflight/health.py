"""The site's own word on a node: a command whose exit status says what the node is good for.

The convention is that of NVRx's health checks, of Meta's gpucm and of prolog scripts: what cannot
be asked is no reason to leave a node out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

_SHOWN_CHARACTERS = 200
_NOT_FOUND = (126, 127)  # by the shell: not executable, not there


class Health(IntEnum):
    """Exit statuses of a health command."""

    GOOD = 0
    SPARE_ONLY = 1  # a role only where no good node is left
    OUT = 2


@dataclass(frozen=True)
class Answer:
    """What the command said, and the last line that it printed."""

    health: Health = Health.GOOD
    text: str = ""


def ask(command: str, limit_seconds: float) -> Answer:
    """Run the command by the shell and return its answer; blocks for ``limit_seconds`` at most.

    A command that is not there means that the node is good; one that does not end in time, or ends
    with another status than the three, that it is to be used last. The text says why.
    """
    end = run_by_shell(command, limit_seconds)
    if end.status is None:
        return Answer(Health.SPARE_ONLY, f"no answer within {limit_seconds:g} s")
    last = end.last_line or "it printed nothing"
    if end.status in _NOT_FOUND:
        return Answer(Health.GOOD, f"not asked: {last}")
    if end.status not in set(Health):
        return Answer(Health.SPARE_ONLY, f"ended with status {end.status}: {last}")
    return Answer(Health(end.status), last)


@dataclass(frozen=True)
class End:
    """How a command ended; ``status`` is None for one that did not in time, and was killed."""

    status: int | None
    last_line: str


def run_by_shell(
    command: str,
    limit_seconds: float,
    given: bytes = b"",
    environment: Mapping[str, str] | None = None,
) -> End:
    """Run a command with ``given`` on its standard input; blocks for ``limit_seconds`` at most."""
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
        source.write(given)
        source.seek(0)
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=source,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
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


def _shown(line: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in line)[:_SHOWN_CHARACTERS]
