"""Views of real runs while something is wrong: titles, numbers, advice."""

import json
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli.common import StatusPoller
from deadpool_megatron.cli.metrics import metrics
from deadpool_megatron.cli.run_result import read_story
from deadpool_megatron.cluster.run_directory.directory import read_json
from deadpool_megatron.events import Kind
from deadpool_megatron.observe.view import State, View, view
from tests.cluster.runs import Run, deadpool, send, start
from tests.common.wait import wait_for
from tests.vault.conftest import file_system

pytestmark = [pytest.mark.slow, pytest.mark.full]


@contextmanager
def filled(mount: Path) -> Iterator[None]:
    """No page is left there."""
    ballast = mount / "ballast"
    subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], capture_output=True)
    try:
        yield
    finally:
        ballast.unlink()


def seen(run: Run, skew: float = 0.0) -> View:
    """The view of a run as each command has it."""
    status = wait_for("an answer", StatusPoller(run.run).status)
    return view(read_story(run.run.path), status, run.run.path, float(status["now"]) + skew)


def shown(run: Run) -> dict[str, Any]:
    """Return the lines and the JSON of `deadpool status`."""
    text = deadpool("status", str(run.run.path))
    assert text.returncode == 0, text.stderr
    values = json.loads(deadpool("status", "--json", str(run.run.path)).stdout)
    return {**values, "lines": text.stdout.splitlines()}


def samples(found: View) -> dict[str, float]:
    return {
        ".".join((sample.name, *sample.labels.values())): sample.value
        for metric in metrics(found, {})
        for sample in metric.samples
    }


def test_full_run_directory_is_shown_everywhere_and_nothing_is_lost(tmp_path):
    """A recovery waits for the journal, which is in the directory, too: that is shown as well."""
    with (
        file_system(tmp_path / "small", "2m") as mount,
        Run(mount / "r", "--step-seconds", "0.05") as run,
    ):
        run.wait_iteration(10)
        with filled(mount):
            wait_for("the view to say so", lambda: seen(run).events_waiting)
            written = run.newest_iteration()
            wait_for("iterations", lambda: seen(run).iteration > written + 20)
            found = seen(run)
            assert found.title.startswith("Running; r is full since ")
            assert found.to_do == f"make room on its file system ({run.run.path})"
            assert found.step_seconds_ago is not None
            assert found.step_seconds_ago < 30.0
            values = samples(found)
            assert values["deadpool_events_waiting"] > 20
            assert values["deadpool_iteration"] > written + 20
            assert values["deadpool_state.running"] == 1
            status = shown(run)
            assert status["lines"][0].startswith("Running; r is full since ")
            assert "to do: make room on its file system" in status["lines"][1]
            report = deadpool("report", str(run.run.path)).stdout.splitlines()
            assert ": Running; r is full since " in report[0]
            wait_for("the launcher's line", lambda: " r is full since " in run.output.read_text())
            assert run.newest_iteration() <= written + 20, "none of it is in the files"
            assert "To do: make room on its file system" in run.output.read_text()
            send(run.listing(0)["members"]["0"])
            waits = "waits for the journal of epoch 2; r is full since "
            wait_for("the wait for the journal", lambda: waits in seen(run).title)
            found = seen(run)
            assert found.state is State.RECOVERING
            assert [failure.kind for failure in found.story.failures] == ["process-crash"]
        wait_for("the recovery", lambda: run.events(Kind.RECOVERED))
        run.finish()  # each step is there, once
        assert "recovered in" in run.output.read_text()
        assert seen_after(run) == ["process-crash"]


def test_a_failure_that_cannot_be_written_is_shown(tmp_path):
    """Only the events have no room, so that the run recovers."""
    with Run(tmp_path / "r", "--step-seconds", "0.05") as run:
        run.wait_iteration(60)  # more bytes than a record has
        coordinator = read_json(run.run.coordinator)["pid"]
        _, hard = resource.prlimit(coordinator, resource.RLIMIT_FSIZE)
        size = run.run.events.stat().st_size
        resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (size, hard))
        wait_for("the view to say so", lambda: seen(run).events_waiting)
        send(run.listing(0)["members"]["0"])
        wait_for("the recovery", lambda: seen(run).story.survived)
        wait_for("training", lambda: seen(run).state is State.RUNNING)
        status = shown(run)
        assert "r cannot be written (File too large) since " in status["lines"][0]
        assert any("failures survived: 1" in line for line in status["lines"])
        assert any("[process-crash]" in line for line in status["lines"])
        assert samples(seen(run))["deadpool_recoveries_total.process-crash"] == 1
        assert run.events(Kind.EPOCH_CLOSED) == []
        resource.prlimit(coordinator, resource.RLIMIT_FSIZE, (hard, hard))
        run.wait_event(Kind.RECOVERED)
        wait_for("all of it", lambda: not seen(run).events_waiting)
        assert seen(run).story.survived == 1, "once"
        assert run.events(Kind.NODE_LOST) == []
        run.finish()  # each step is there, once
        texts = [str(event.data["text"]) for event in run.events(Kind.LOG)]
        assert any("events could not be written for" in text for text in texts)


def seen_after(run: Run) -> list[str]:
    return [failure.kind for failure in read_story(run.run.path).failures]


def test_wait_for_a_spare_is_shown_whatever_the_clock_of_the_viewer(tmp_path):
    """The roles lack copies as long as all views show it; the counter of the wait grows."""
    patient = ("--deadpool-spare-timeout", "120")
    with Run(tmp_path / "r", "--step-seconds", "0.05", spares=0, options=patient) as run:
        run.wait_iteration(5)
        assert [seen(run, skew).title for skew in (7200.0, -7200.0)] == ["Running", "Running"]
        assert "7200 s later" in dict(seen(run, 7200.0).notes())["clock"]
        coordinator = json.loads(deadpool("status", "--json", str(run.run.path)).stdout)
        node = 1 - coordinator["coordinator"]["node"]
        send(run.listing(node)["agent"])
        wait_for("the wait", lambda: seen(run).state is State.WAITING)
        found = seen(run)
        assert (found.look, found.exposed) == ("bad", [0, 1])
        assert found.to_do.startswith("start another node as a spare: deadpool agent --run-dir")
        counter = "deadpool_node_time_seconds_total.waiting-for-spare"
        waited = samples(found)[counter]
        wait_for("the counter", lambda: samples(seen(run))[counter] > waited)
        line = "to do: start another node as a spare"
        wait_for("the line", lambda: line in run.output.read_text())
        status = shown(run)
        assert status["lines"][0].startswith("Waiting for a spare: training stands still")
        assert status["state"] == State.WAITING
        agent = start(tmp_path / "agent.out", "agent", "--run-dir", str(run.run.path), "--attach")
        try:
            recovered = run.wait_event(Kind.RECOVERED)
            wait_for("training", lambda: seen(run).state is State.RUNNING)
            (failure,) = seen(run).story.failures
            assert failure.exposed_seconds >= recovered.data["phases"]["wait"]
            run.finish()
        finally:
            agent.kill()


def test_a_takeover_is_no_loss_of_copies(tmp_path):
    with Run(tmp_path / "r", "--step-seconds", "0.05", spares=1) as run:
        run.wait_iteration(5)
        deadpool("kill", "--coordinator", str(run.run.path))
        run.wait_event(Kind.COORDINATOR, 2)
        states = set[State]()

        def is_back() -> bool:
            found = seen(run)
            states.add(found.state)
            if found.state is State.TAKEOVER:
                assert found.exposed is None
                assert "not known" in found.at_risk()
            return found.state is State.RUNNING and found.story.silence is None

        wait_for("all agents", is_back)
        assert states <= {State.TAKEOVER, State.RUNNING, State.UNANSWERED}
        assert [failure.kind for failure in seen(run).story.failures] == ["coordinator"]
        assert samples(seen(run))["deadpool_failures_total.coordinator"] == 1
        run.finish()
