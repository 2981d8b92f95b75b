"""Events are output: neither their number nor what becomes of their files has a say in a run."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli.common import CommandError, ask
from deadpool_megatron.cluster.journal.terms import newest_term
from deadpool_megatron.events import Kind
from tests.cluster.agents import Agents
from tests.cluster.running import deadpool
from tests.common.waiting import wait_for

pytestmark = pytest.mark.slow
# Nobody may be fenced, however busy the machine is.
_PATIENT = (
    *("--deadpool-fence-seconds", "16"),
    *("--deadpool-node-silence-seconds", "20"),
    *("--deadpool-rejoin-seconds", "30"),
    *("--deadpool-takeover-seconds", "8"),
)


def status(run: Agents) -> dict[str, Any]:
    """What ``deadpool status`` is told; empty while nobody serves. Asked now and then: it is the
    coordinator's own time.
    """
    time.sleep(0.2)
    try:
        return dict(ask(run.run, {"command": "status"})["status"])
    except (CommandError, OSError):
        return {}


def goes_on(run: Agents, term: int) -> None:
    """The coordinator of this term serves, and training goes on under it."""
    journal = run.journal()

    def newest() -> int:
        found = newest_term(journal)
        return 0 if found is None else found.number

    wait_for("the next term", lambda: newest() >= term)
    found = wait_for("an open epoch", lambda: _running(run))
    reached = found["iteration"]
    wait_for("new iterations", lambda: _running(run).get("iteration", 0) >= reached + 5)


def _running(run: Agents) -> dict[str, Any]:
    told = status(run)
    return told if told.get("phase") == "running" else {}


def test_a_takeover_waits_for_no_file_of_events(tmp_path: Path) -> None:
    with Agents(tmp_path / "r", options=_PATIENT) as run:
        run.wait_iteration(5)
        events = run.run.events
        aside = events.with_suffix(".aside")
        events.rename(aside)
        os.mkfifo(events)  # who opens it waits for ever
        os.kill(run.term().pid, signal.SIGKILL)
        goes_on(run, 2)
        events.unlink()
        aside.rename(events)
        assert run.events(Kind.NODE_LOST) == []
        assert run.epochs() == [1]
        run.finish()


def test_events_that_cannot_be_written_for_a_while_cost_nothing(tmp_path: Path) -> None:
    with Agents(tmp_path / "r", options=_PATIENT) as run:
        run.wait_iteration(30)  # more bytes than a record has
        coordinator = run.term().pid
        _, hard = resource.prlimit(coordinator, resource.RLIMIT_FSIZE)
        size = run.run.events.stat().st_size
        resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (size, hard))
        trouble = wait_for("the status to say so", lambda: status(run)["events"]["trouble"])
        assert "File too large" in trouble
        assert "File too large" in deadpool("status", str(run.run.path)).stdout
        reached = status(run)["iteration"]
        wait_for("more iterations", lambda: status(run)["iteration"] >= reached + 10)
        resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (hard, hard))
        run.wait_more(5)
        assert run.events(Kind.NODE_LOST) == []
        assert run.epochs() == [1]
        told = [str(event.data["text"]) for event in run.events(Kind.LOG)]
        assert any("events could not be written for" in text for text in told)
        run.finish()  # each step is there, once
