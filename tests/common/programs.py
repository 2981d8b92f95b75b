"""Stand-ins for programs of the machine, and commands that find them first."""

import os
import subprocess
import sys
from pathlib import Path

from tests.common.wait import MAX_WAIT_SECONDS


def stand_in(folder: Path, **programs: str) -> Path:
    """Write programs of bash, by their names; return the folder."""
    folder.mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def check_output(*command: str | Path, seconds: float = 600.0, **variables: str) -> str:
    """Return the output of a command that succeeds; ``-c`` and ``-m`` run this interpreter."""
    whole = (sys.executable, *command) if str(command[0]).startswith("-") else command
    environment = {**os.environ, **variables}
    done = subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_among(
    folder: Path, *command: str | Path, cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, good or bad; programs of ``folder`` come before all others."""
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        env={**os.environ, "PATH": path, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_SECONDS,
        check=False,
    )
