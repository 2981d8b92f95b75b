"""What each node of a Slurm job does beside its agent, with stand-ins for Slurm and the clock."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.common.waiting import PATIENCE_SECONDS

NODE = Path(__file__).parents[2] / "scripts" / "slurm" / "node.sh"
NOTICE = 300
# The agent lives until its node has slept, or given an order.
_TELL = 'echo "${{0##*/}} $*" >{told}'
_AGENT = "read -r word <{told}; echo $word"


def first_act(tmp_path: Path, end: int, squeue: str) -> list[str]:
    """Which command the node runs first, and its arguments, with the clock at 1000. ``end``: of the
    job, as its environment has it from its start."""
    told, programs = tmp_path / "told", tmp_path / "bin"
    os.mkfifo(told)
    held = os.open(told, os.O_RDWR)  # what is told before the agent listens is not lost
    programs.mkdir()
    clock = 'case $1 in +%s) echo 1000 ;; -d) [ "$2" = far ] && echo 999999 ;; esac'
    tell = _TELL.format(told=told)
    stand_ins = {"date": clock, "squeue": squeue, "sleep": tell, "deadpool": tell}
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_END_TIME": str(end)}
    done = subprocess.run(
        [NODE, tmp_path / "run", str(NOTICE), "bash", "-c", _AGENT.format(told=told)],
        env={**os.environ, **slurm, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
    )
    os.close(held)  # everybody has ended who could hold its output
    return done.stdout.split()


@pytest.mark.parametrize("squeue", ["exit 1", "true", "echo N/A"])
def test_the_state_is_saved_in_time_where_slurm_says_nothing_new(
    tmp_path: Path, squeue: str
) -> None:
    found = first_act(tmp_path, 1200, squeue)
    run = str(tmp_path / "run")
    assert found == ["deadpool", "stop", "--dump", "--within", "200", "--wait", "200", run]


def test_a_limit_that_was_extended_ends_no_run(tmp_path: Path) -> None:
    """The environment tells the end that the job had when it started."""
    until_notice = 999999 - NOTICE + 5 - 1000
    assert first_act(tmp_path, 1200, "echo far") == ["sleep", str(until_notice)]
