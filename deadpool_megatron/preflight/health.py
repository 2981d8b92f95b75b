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
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = child.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            return Answer(Health.SPARE_ONLY, f"no answer within {limit_seconds:g} s")
        finally:
            # What it has started in turn, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4096))
        said = output.read().decode(errors="replace").strip().splitlines()
    last = _shown(said[-1]) if said else "it printed nothing"
    if status in _NOT_FOUND:
        return Answer(Health.GOOD, f"not asked: {last}")
    if status not in set(Health):
        return Answer(Health.SPARE_ONLY, f"ended with status {status}: {last}")
    return Answer(Health(status), last)


def _shown(line: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in line)[:_SHOWN_CHARACTERS]
