"""Processes and shared memory of a trial's runs, which are found, and ended, from outside."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

from deadpool_megatron import failpoints
from tests.common.wait import wait_for

_GONE_SECONDS = 15.0


def left_over(directory: Path, in_order: bool) -> Iterator[str]:
    """A line about processes, and about shared memory after an end in order."""
    try:
        wait_for("no process", lambda: not [*_processes(directory)], _GONE_SECONDS)
    except AssertionError:
        yield f"processes are left: {sorted(_processes(directory))}"
    if in_order and (names := [path.name for path in _segments(directory)]):
        yield f"shared memory is left: {names[:4]}"


def end_all(directory: Path) -> None:
    """End all processes and remove all shared memory of the runs in this directory."""
    for pid in _processes(directory):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    for path in _segments(directory):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _processes(directory: Path) -> Iterator[int]:
    """All that any run in the directory has started: they have its plan of faults."""
    entry = f"{failpoints.ENVIRONMENT_NAME}={directory}/".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            dead = b") Z " in (path / "stat").read_bytes()
            if not dead and entry in (path / "environ").read_bytes():
                yield int(path.name)
        except OSError:
            continue  # gone meanwhile


def _segments(directory: Path) -> list[Path]:
    """Return the shared memory of the runs in the directory."""
    found = [json.loads(path.read_text())["run_id"] for path in directory.glob("*/run.json")]
    return [path for path in Path("/dev/shm").iterdir() if any(run in path.name for run in found)]
