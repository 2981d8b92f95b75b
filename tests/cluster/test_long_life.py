"""Runs that are long or large."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli.common import CommandError, ask
from deadpool_megatron.cluster.journal.terms import newest_term
from deadpool_megatron.events import Event, Kind, term_file, to_line
from tests.cluster.runs import Agents
from tests.common.limits import setting_flags
from tests.common.wait import wait_for

pytestmark = pytest.mark.slow
# No agent may be fenced, however busy the machine is.
_PATIENT = setting_flags(
    fence_seconds=16, node_silence_seconds=20, rejoin_seconds=30, takeover_seconds=8
)
ROOT = Path(__file__).parents[2]
AGENTS = 24


def status(run: Agents) -> dict[str, Any]:
    """Return the answer to ``deadpool status``; empty without a coordinator. Not too often: it
    takes the coordinator's own time.
    """
    time.sleep(0.2)
    try:
        return dict(ask(run.run, {"command": "status"})["status"])
    except (CommandError, OSError):
        return {}


def goes_on(run: Agents, term: int) -> None:
    """Wait until the coordinator of this term serves, and training continues."""
    journal = run.journal()

    def newest() -> int:
        found = newest_term(journal)
        return 0 if found is None else found.number

    wait_for("the next term", lambda: newest() >= term)
    found = wait_for("an open epoch", lambda: _running(run))
    reached = found["iteration"]
    wait_for("new iterations", lambda: _running(run).get("iteration", 0) >= reached + 5)


def _running(run: Agents) -> dict[str, Any]:
    found = status(run)
    return found if found.get("phase") == "running" else {}


def was_opened(fifo: Path) -> bool:
    """Return whether a process waits in opening it: a reader of it never returns."""
    try:
        os.close(os.open(fifo, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno == errno.ENXIO:
            return False
        raise
    return True


def test_takeover_in_an_old_run_opens_no_old_file(tmp_path):
    """How soon is printed: it is the machine's. That nothing old is opened is asserted."""
    with Agents(tmp_path / "r", options=_PATIENT) as run:
        run.wait_iteration(5)
        old = make_old(run)
        os.kill(run.term().pid, signal.SIGKILL)
        goes_on(run, 2)
        opened = [path for path in old.fifos if was_opened(path)]
        for path in old.files:  # before a failure, whose report reads all events
            path.unlink()
        assert opened == []
        (taken_over,) = [e for e in run.events(Kind.COORDINATOR) if e.data["term"] == 2]
        claimed_at = (run.run.journal / "term-00000002.json").stat().st_mtime
        back = [e for e in run.events(Kind.NODE_JOINED) if e.wall_seconds > claimed_at]
        assert len(back) == 3
        served = max(event.wall_seconds for event in back) - claimed_at
        print(
            f"claimed, {taken_over.wall_seconds - claimed_at:.2f} s later up,"
            f" all agents back after {served:.2f} s"
        )
        assert run.events(Kind.NODE_LOST) == []
        assert run.epochs() == [1]
        run.finish()


@dataclass(frozen=True)
class Old:
    """Files of old events of a run; opening any of ``fifos`` hangs."""

    files: list[Path]
    fifos: list[Path]


def make_old(run: Agents) -> Old:
    """Give a living run what it would have gathered in months: 2,000,000 events of its first term,
    and 10,000 entries in its journal, which cost the same as epochs where they are listed.
    """
    line = to_line(Event(Kind.COMMITTED, 1, 7, 11, 100, data={"lineage": 1, "bytes": 1 << 30}))
    first = term_file(run.run.events, 1, 2)
    first.write_bytes(100_000 * line)
    files = [first, *(term_file(run.run.events, 1, part) for part in range(3, 24))]
    for path in files[1:20]:
        os.link(first, path)
    fifos = files[20:]
    for path in fifos:
        os.mkfifo(path)
    entry = run.run.journal / "node-01000000.json"
    entry.write_text("{}\n")
    for node in range(1_000_001, 1_010_000):
        os.link(entry, run.run.journal / f"node-{node:08d}.json")
    return Old(files, fifos)


@pytest.mark.full
def test_simulated_agents_live_through_a_loss_and_a_takeover(tmp_path):
    """The bench succeeds only if every agent gets each decision and is back after a kill."""
    bench = ROOT / "scripts" / "bench.py"
    found = tmp_path / "found.json"
    size = ("--agents", str(AGENTS), "--seconds", "0.5", "--out", found)
    done = subprocess.run(
        [sys.executable, bench, "coordinator", *size],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(found.read_text())["rows"]
    values = {name: mean for name, (mean,) in row["values"].items()}
    assert row["at"] == AGENTS
    # A record of all roles as it is compressed, and the close.
    assert values["told_bytes_per_agent"] < 8000
    # As many bytes of events as 512 roles may write that all wait at every gate.
    assert values["event_bytes_per_day"] < 50e6
    assert values["takeover_to_steps_seconds"] > values["takeover_seconds"] > 0
