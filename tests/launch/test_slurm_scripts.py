"""Functions of job and nodes under Slurm, with stand-ins for Slurm and the clock; see calls/."""

import os
import re
from pathlib import Path

from tests.common.calls import test_calls_are_answered_as_before  # noqa: F401
from tests.common.programs import run_among, stand_in

SLURM = Path(__file__).parents[2] / "scripts" / "slurm"
SIZE = {"NODES": "2", "SPARES": "1", "GPUS_PER_NODE": "1", "NOTICE_SECONDS": "60"}
_TIME = re.compile(r"^\d{4}-\d\d-\d\d [\d:]{8}  |(?<=over for )\d+ s", re.MULTILINE)
# The agent lives until its node has slept, or given an order.
_REPORT = 'echo "${{0##*/}} $*" >{pipe}'
_AGENT = "read -r line <{pipe}; echo $line"


def first_command(directory: Path, end: int, squeue: str) -> str:
    """Return the first command of a node, with the clock at 1000. ``end``: that of the job in its
    environment."""
    pipe, programs = directory / "pipe", directory / "bin"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDWR)  # keeps a report from before the agent reads
    clock = 'case $1 in +%s) echo 1000 ;; -d) [ "$2" = far ] && echo 999999 ;; esac'
    report = _REPORT.format(pipe=pipe)
    stand_in(programs, date=clock, squeue=squeue, sleep=report, deadpool=report)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_END_TIME": str(end)}
    agent = ("bash", "-c", _AGENT.format(pipe=pipe))
    done = run_among(programs, SLURM / "node.sh", directory / "run", "300", *agent, **slurm)
    assert done.returncode == 0, done.stderr
    os.close(held)  # all processes that could have its output have ended
    return done.stdout.strip()


def job(directory: Path, call: str, programs: dict[str, str], **variables: str) -> int:
    """Call a function of job.sh, with these programs before those of the machine; print each line
    of its output once, without times, and return its status."""
    folder = stand_in(directory / "bin", **programs)
    done = run_among(folder, "bash", "-c", f'. "$0" && {call}', SLURM / "job.sh", **variables)
    for line in dict.fromkeys(_TIME.sub("", done.stdout).splitlines()):
        print(line)
    return done.returncode
