"""All processes of a run die while its hosts live: the next run continues from memory."""

import os
import re
import signal

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json, segment_root
from deadpool_megatron.events import Event, Kind
from tests.cluster.counting_member import expected_sha256
from tests.cluster.runs import FAST, MEMBER, Agents, Run, deadpool, send
from tests.common.finished_run import read_final
from tests.common.wait import MAX_WAIT_SECONDS, wait_for

pytestmark = pytest.mark.slow
ENDLESS = ("--step-seconds", "0.02")


def kill_everything(run: RunDirectory, launcher: int) -> None:
    """SIGKILL every process of the run at once, vaults too: a job step that is killed."""
    pids = [launcher, *cleanup.run_processes(run, run.read_run().run_id)]
    for pid in pids:
        posix.kill(pid, signal.SIGSTOP)  # none sees another die
    for pid in pids:
        posix.kill(pid)
    assert not posix.wait_until_ended(pids, 30)


def mind_a_notice_and_lose_agents(first: Run) -> None:
    """A scheduler's notice ends no process; then all agents are killed together."""
    agents = [int(first.listing(node)["agent"]) for node in range(3)]
    processes = [first.launcher.pid, *cleanup.run_processes(first.run, first.run.read_run().run_id)]
    for pid in processes:
        posix.kill(pid, signal.SIGUSR1)
    first.wait_iteration(first.newest_iteration() + 5)
    assert all(posix.is_alive(pid) for pid in processes)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in agents:
            posix.kill(pid, number)
    assert first.launcher.wait(60) == 1
    output = first.output.read_text()
    assert "exit status 1: no node is left" in output
    assert "checkpoint" not in output
    assert re.search(r"holds \d+\.\d MiB in memory: the same command", output), output


def decided(events: list[Event]) -> list[str]:
    """Where each epoch's state came from."""
    return [e.data["restore"] for e in events if e.kind is Kind.EPOCH_DECIDED]


def texts(events: list[Event]) -> str:
    return "\n".join(str(e.data.get("text")) for e in events if e.kind is Kind.LOG)


def test_every_member_and_the_coordinator_at_once(tmp_path):
    with Run(tmp_path / "r", *ENDLESS, nodes=2, spares=0) as run:
        run.wait_iteration(5)
        listings = [run.listing(node) for node in range(2)]
        send(read_json(run.run.coordinator)["pid"])
        for pid in [pid for listing in listings for pid in listing["members"].values()]:
            send(pid)
        run.wait_event(Kind.RECOVERED)
        run.finish()
        assert set(decided(run.events())[1:]) == {"memory"}


@pytest.mark.parametrize(
    "how", ["everything", "agents", "hangup", pytest.param("launcher", marks=pytest.mark.full)]
)
def test_restarted_run_continues_from_memory(tmp_path, how):
    # The second run removes all of both; a failure before it cleans up as well.
    with Run(tmp_path / "r", *ENDLESS, nodes=2, spares=1) as first:
        first.wait_iteration(5)
        if how == "everything":
            kill_everything(first.run, first.launcher.pid)
        elif how == "agents":
            mind_a_notice_and_lose_agents(first)
        elif how == "launcher":
            first.launcher.kill()
        else:
            os.kill(first.launcher.pid, signal.SIGHUP)
            assert first.launcher.wait(MAX_WAIT_SECONDS) == 130
            last = first.output.read_text().splitlines()[-1]
            assert "MiB in memory" in last
            assert f"'deadpool clean {first.run.path}' removes it" in last
        first.launcher.wait(MAX_WAIT_SECONDS)
        run_id = first.run.read_run().run_id
        reached = first.newest_iteration()
        with Run(tmp_path / "r", *ENDLESS, nodes=2, spares=1) as run:
            run.wait_event(Kind.RECOVERED)
            assert run.run.read_run().run_id == run_id
            final = run.finish()
    events = run.events()
    assert decided(events) == ["initial", "memory"]
    assert "restarted: continues from generation 1:" in texts(events)
    lost = [str(event.data["cause"]) for event in events if event.kind is Kind.NODE_LOST]
    assert not [cause for cause in lost if "join again" in cause]
    generation = next(e.data["generation"] for e in events if decided([e]) == ["memory"])
    assert reached - 2 <= generation[1] <= final["iterations"]
    assert final["recoveries"][0]["kind"] == "restart"
    assert f"run {run_id} is started again; slots of" in run.output.read_text()


@pytest.mark.full
def test_killed_launcher_leaves_only_slots(tmp_path):
    with Run(tmp_path / "r", *ENDLESS, nodes=2, spares=0) as run:
        run.wait_iteration(3)
        run.launcher.kill()
        run.launcher.wait(MAX_WAIT_SECONDS)
        run_id = run.run.read_run().run_id
        pids = cleanup.run_processes(run.run, run_id)
        assert not posix.wait_until_ended(pids, 30)
        assert list(segment_root(run_id).glob("node*/own-*.seg"))
        assert not run.run.final.exists()
        other = deadpool(
            *("run", "--nodes", "3", "--nproc-per-node", "1", "--run-dir", str(run.run.path)),
            *("--", "-m", "deadpool_megatron.trainer"),
        )
        assert other.returncode == 2
        assert "has --nodes 2, not 3" in other.stderr
        assert "run" in deadpool("clean", "--yes", str(run.run.path)).stdout


def test_returning_agent_has_the_only_copy(tmp_path):
    """Nothing but its own slots holds role 1: with ``local`` there are no copies elsewhere."""
    options = ("--deadpool-protection", "local")
    with Agents(tmp_path / "r", *ENDLESS, nodes=2, spares=0, options=options) as agents:
        agents.wait_iteration(5)
        node = 1 if agents.term().node == 0 else 0
        agents.agents[str(node)].kill()
        agents.agents[str(node)].wait()
        wait_for("the loss", lambda: agents.events(Kind.NODE_LOST))
        agents.start(str(node), "--node-id", str(node))
        wait_for("the recovery", lambda: agents.events(Kind.RECOVERED))
        agents.finish()
        assert set(decided(agents.events())[1:]) == {"memory"}
        log = (tmp_path / "r-outputs" / f"{node}.out").read_text()
        assert f"the slots of node {node}" in log


@pytest.mark.full
def test_dump_of_live_nodes_is_completed_from_memory_of_a_dead_node(tmp_path):
    """The other nodes write their slots; the memory of the dead node completes the dump."""
    options = ("--deadpool-protection", "local", "--deadpool-spare-timeout-seconds", "1")
    with Agents(tmp_path / "r", *ENDLESS, nodes=2, spares=0, options=options) as agents:
        agents.wait_iteration(5)
        agents.power_off(1 if agents.term().node == 0 else 0)
        wait_for("the end", agents.run.final.exists)
        final = read_final(agents.run.path)
        assert final["exit_status"] == 1
        assert "wrote what they held" in final["reason"]
        for agent in agents.agents.values():
            agent.wait(60)
        resumed = deadpool(
            *("run", "--resume", str(agents.run.path), "--run-dir", str(tmp_path / "new")),
            *("--nodes", "2", "--nproc-per-node", "1", *FAST, "--", MEMBER),
            *("--iterations", str(final["iterations"] + 5)),
        )
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        assert "generation 1:" in resumed.stdout
        new = read_final(tmp_path / "new")
        for role in range(2):
            expected = expected_sha256(role, final["iterations"] + 5)
            assert new["roles"][str(role)]["sha256"] == expected
        verified = deadpool("verify", str(agents.run.path))
        assert verified.returncode == 0, verified.stdout
