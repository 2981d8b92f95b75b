"""Agents after a check: they take its node ids, and do not start where it has left them out."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json
from tests.cluster.counting_member import expected_sha256
from tests.cluster.running import FAST, MEMBER, PATIENCE_SECONDS, deadpool, environment
from tests.preflight.nodes import Check

COMMAND = ("--", MEMBER, "--iterations", "10")
SIZE = ("--nodes", "2", "--nproc-per-node", "1", "--preload", "")


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Whatever a test puts in here is ended with it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for agent in started:
        agent.kill()
        agent.wait()


def start_agent(run: RunDirectory, node: int) -> subprocess.Popen[bytes]:
    place = ("--run-dir", str(run.path), "--node-id", str(node))
    with open(run.path.with_name(f"agent-{node}.out"), "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "deadpool_megatron", "agent", *place, *SIZE, *FAST, *COMMAND],
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


@pytest.mark.slow
def test_a_run_on_the_good_nodes(agents: list[subprocess.Popen[bytes]], tmp_path: Path) -> None:
    here = {"hostname": socket.gethostname()}
    made_up = {node: {"facts": here} for node in range(3)}
    made_up[0] = {"facts": {**here, "versions": {"torch": "another one"}}}
    with Check(tmp_path, spares=1, made_up=made_up) as check:
        check.start(0, 1, 2)
        check.end()
        assert check.ids() == [None, 0, 1]
    run = RunDirectory(check.directory)

    left_out = deadpool("agent", "--run-dir", str(run.path), "--node-id", "0", *SIZE, *COMMAND)
    assert left_out.returncode == 2
    assert left_out.stderr.startswith("deadpool agent: deadpool check has left this node out: ")
    assert "torch is another one" in left_out.stderr
    assert len(left_out.stderr.splitlines()) == 1
    assert not (run.path / "run.json").exists()

    agents += [start_agent(run, 1), start_agent(run, 2)]
    for node, agent in enumerate(agents):
        limit = time.monotonic() + PATIENCE_SECONDS
        while run.node_listings().get(node, {}).get("agent") != agent.pid:
            assert agent.poll() is None, f"agent of node {node} ended too soon"
            assert time.monotonic() < limit, f"node {node} was not started by its agent"
            time.sleep(0.01)
    assert [agent.wait(PATIENCE_SECONDS) for agent in agents] == [0, 0]
    assert read_json(run.final)["roles"]["1"]["sha256"] == expected_sha256(1, 10)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"nodes": [{}]}', '{"nodes": 5}'])
def test_a_damaged_verdict_is_not_guessed_at(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "check.json").write_text(text)
    agent = ["agent", "--run-dir", str(tmp_path), "--node-id", "0", *SIZE, *COMMAND]
    assert cli.main(agent) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'check.json'} is damaged: " in said
    assert len(said.splitlines()) == 1
