"""Starts of processes of this package beside an agent's members: its vault, or an exporter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deadpool_megatron.cluster.process.liveness import ChildWatch, Ending
from deadpool_megatron.cluster.run_directory.directory import (
    ENVIRONMENT_DIRECTORY,
    ENVIRONMENT_RUN_ID,
    RunDirectory,
)
from deadpool_megatron.process_names import interpreter


def start_child(
    command: Sequence[str],
    run: RunDirectory,
    run_id: str,
    log: Path,
    on_end: Callable[[Ending], None],
    environment: Mapping[str, str],
    sockets: Sequence[int] = (),
) -> ChildWatch:
    """Start ``python -m *command`` in a process group of its own, found by the run's name.

    What it prints is appended to ``log``, in the host's memory; ``environment`` is added to this
    process's own, ``sockets`` are descriptors that it inherits under their numbers. Without a
    parent-death signal: who should have one sets it. For the loop's thread; raises OSError.
    """
    with open(log, "ab") as output:
        process = subprocess.Popen(
            interpreter("-m", *command),
            pass_fds=tuple(sockets),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
            env={
                **os.environ,
                ENVIRONMENT_DIRECTORY: str(run.path),
                ENVIRONMENT_RUN_ID: run_id,
                **environment,
            },
        )
    process.returncode = 0  # reaped by its pid: this object must not try to as well
    return ChildWatch(process.pid, on_end)
