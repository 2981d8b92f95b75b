"""No coordinator is needed for longer than it takes a standby to claim the next term."""

import json
import os
import signal

import pytest

from deadpool_megatron.cluster.run_directory.directory import read_json
from deadpool_megatron.events import Kind
from tests.cluster.runs import Agents, deadpool, send
from tests.common.finished_run import read_final
from tests.common.limits import setting_flags
from tests.common.wait import MAX_WAIT_SECONDS, wait_for

pytestmark = pytest.mark.slow
# Wait of a new coordinator for a node that was lost together with the old coordinator.
_SOON = setting_flags(rejoin_seconds=6)


def test_agents_alone_make_a_run_with_the_coordinator_on_the_spare(tmp_path):
    with Agents(tmp_path / "r", "--iterations", "30") as run:
        run.check_result(30)
        assert run.term().node == 2
        assert [agent.wait() for agent in run.agents.values()] == [0, 0, 0]
    again = deadpool("agent", "--run-dir", str(run.run.path), "--node-id", "0")
    assert again.returncode == 2
    assert "is over" in again.stderr


@pytest.mark.full
def test_order_to_end_outlives_its_coordinator(tmp_path):
    """The command may have ended: the next coordinator carries out its order once."""
    fault = {"id": "coordinator", "point": "coordinator.request"}
    with Agents(tmp_path / "r", spares=2, faults=[fault]) as run:
        run.wait_iteration(5)
        deadpool("stop", "--dump", "--within", "60", str(run.run.path))
        run.wait_term(2)
        wait_for("the result", run.run.final.exists)
    final = read_final(run.run.path)
    assert final["exit_status"] == 75, final["reason"]
    assert final["reason"].startswith("stopped by 'deadpool stop --dump'; state dumped to")
    (dumped,) = run.events(Kind.DUMPED)
    assert dumped.data["generation"][1] == final["steps"][-1]["iteration"], "nothing is lost"


def test_node_of_the_coordinator_and_a_training_node_die_together(tmp_path):
    with Agents(tmp_path / "r", nodes=3, spares=2) as run:
        run.wait_iteration(5)
        first = run.term()
        assert first.node is not None
        send(first.pid)  # before it could see the other node die
        run.power_off(first.node)
        # Not node 0: its last steps would not be reported yet, and they are checked.
        run.power_off(1)
        run.wait_term(2)
        run.wait_more(5)
        final = run.finish()
    (recovery,) = final["recoveries"]
    assert list(recovery["seats_changed"]) == ["1"]
    assert "its host refuses connections" in recovery["cause"]


@pytest.mark.full
def test_stopped_agent_comes_back_as_a_new_spare(tmp_path):
    # Reports of members wait in their sockets meanwhile, which hold some hundred steps.
    with Agents(tmp_path / "r", "--step-seconds", "0.1", spares=2) as run:
        run.wait_iteration(5)
        wait_for("warm spares", lambda: len(run.events(Kind.MEMBER_WARM)) >= 2)
        listing = read_json(run.run.node(0))
        os.kill(listing["agent"], signal.SIGSTOP)
        wait_for("a swap", lambda: len(run.epochs()) > 1)
        os.kill(listing["agent"], signal.SIGCONT)
        joined = Kind.NODE_JOINED
        wait_for("its return", lambda: any(e.node == 4 for e in run.events(joined)))
        run.wait_more(5)
        final = run.finish()
    assert final["recoveries"][0]["seats_changed"]["0"][0][0] == 0


def test_spare_attaches_to_a_run_that_has_none_left(tmp_path):
    with Agents(tmp_path / "r", spares=0) as run:
        run.wait_iteration(5)
        run.power_off(0)
        wait_for("the loss", lambda: run.events(Kind.NODE_LOST))
        run.start("late", "--attach")
        wait_for("a swap", lambda: len(run.epochs()) > 1)
        run.wait_more(3)
        final = run.finish()
    assert final["recoveries"][0]["seats_changed"]["0"][1][0] == 2


@pytest.mark.full
def test_node_ordered_to_end_moves_its_roles_first(tmp_path):
    """As for an evicted pod, here with the coordinator: its replacement starts while it waits, and
    nothing is lost.
    """
    options = ("--leave-seconds", "60", *_SOON)
    with Agents(tmp_path / "r", spares=0, options=options) as run:
        run.wait_iteration(5)
        node = run.term().node
        assert node is not None
        os.kill(read_json(run.run.node(node))["agent"], signal.SIGTERM)
        wait_for("its drain", lambda: run.events(Kind.DRAIN))
        run.start("late", "--attach")
        assert run.agents[str(node)].wait(MAX_WAIT_SECONDS) == 143
        run.wait_term(2)

        def stages() -> list[tuple[str, str]]:
            status = json.loads(deadpool("status", str(run.run.path), "--json").stdout)
            return [(each["verb"], each["stage"]) for each in status["requests"]]

        # Its coordinator may have ended before the journal had its result.
        wait_for("the drain to be done", lambda: stages() == [("drain", "done")])
        run.wait_more(3)
        final = run.finish()
    recovery = final["recoveries"][0]
    assert recovery["kind"] == "planned"
    assert recovery["seats_changed"][str(node)][1][0] == 2
    assert sum(each["steps_recomputed"] for each in final["recoveries"]) == 0


def test_agent_with_other_settings_is_refused(tmp_path):
    with Agents(tmp_path / "r", spares=0) as run:
        run.wait_iteration(2)
        other = run.start("other", "--node-id", "5", "--nodes", "7")
        assert other.wait(30) == 2
        run.finish()
    text = (tmp_path / "r-outputs" / "other.out").read_text()
    assert "the run has --nodes 2" in text
