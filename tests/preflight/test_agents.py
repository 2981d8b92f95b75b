"""Nodes that join with their facts, as real processes: who is left out, and what is shown of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli.prepare import check
from deadpool_megatron.cluster.run_directory.bad_nodes import (
    BadNode,
    add_bad_node,
    read_bad_nodes,
)
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json, segment_root
from deadpool_megatron.events import Kind, read_events
from tests.cluster.counting_member import expected_sha256
from tests.cluster.runs import FAST, MEMBER, deadpool, environment
from tests.common.wait import MAX_WAIT_SECONDS, wait_for

OTHER = {"versions": {"torch": "another one"}}


class Nodes:
    """Agents with made-up facts. A context manager: nothing outlives it."""

    def __init__(self, directory: Path, *options: str, nodes: int = 2, spares: int = 1) -> None:
        self.run = RunDirectory(directory / "run")
        self.agents: dict[int, subprocess.Popen[str]] = {}
        self._options, self._size = options, (nodes, spares)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
                agent.communicate()

    def start(self, node: int, facts: dict[str, Any] | None = None, **variables: str) -> None:
        named = {"hostname": f"host{node}", **(facts or {})}
        place = ("--run-dir", str(self.run.path), "--node-id", str(node))
        nodes, spares = map(str, self._size)
        size = ("--nodes", nodes, "--spares", spares, "--nproc-per-node", "1", "--preload", "")
        program = (sys.executable, "-m", "tests.preflight.made_up_agent", json.dumps(named))
        self.agents[node] = subprocess.Popen(
            [*program, "agent", *place, *size, *FAST, *self._options],
            env={**environment(), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end_of(self, node: int) -> tuple[int, str, str]:
        """Status, output and errors of an agent, once it has ended."""
        output, errors = self.agents[node].communicate(timeout=MAX_WAIT_SECONDS)
        return self.agents[node].returncode, output, errors


@pytest.mark.slow
def test_run_starts_without_an_unfit_node(tmp_path):
    add_bad_node(tmp_path, BadNode("host0", "device-error", time.time(), "0a0a0a0a", "Xid 79"))
    with Nodes(tmp_path, "--", MEMBER, "--iterations", "10") as nodes:
        nodes.start(0, OTHER)
        nodes.start(1)
        nodes.start(2)
        status, _, errors = nodes.end_of(0)
        assert status == 69
        (line,) = [line for line in errors.splitlines() if "ends: " in line]
        assert "run 0a0a0a0a quarantined host0 on " in line
        assert "torch is another one" in line
        ended = [nodes.end_of(node) for node in (1, 2)]
        assert [status for status, _, _ in ended] == [0, 0], ended
    run = nodes.run
    assert read_json(run.final)["roles"]["0"]["sha256"] == expected_sha256(0, 10)
    (judged,) = [e for e in read_events(run.events) if e.kind is Kind.NODE_JUDGED]
    assert (judged.node, judged.data["standing"]) == (0, "excluded")
    assert not segment_root(run.read_run().run_id).exists()


@pytest.mark.slow
def test_nodes_take_the_variables_of_the_run(tmp_path):
    """A spare started by hand, or by another job, has not what the batch script of the run sets."""
    with Nodes(tmp_path, "--", MEMBER, "--iterations", "10") as nodes:
        nodes.start(0, NVTE_OF_A_TEST="0")
        wait_for("the run", (nodes.run.path / "run.json").exists)
        nodes.start(1)
        nodes.start(2, OTHER, NVTE_OF_A_TEST="0", NCCL_ALGO="Tree")
        status, _, errors = nodes.end_of(2)
        assert status == 69
        assert "NCCL_ALGO is not set, as in the run (it was Tree here)" in errors
        assert "NCCL_ALGO" not in errors.rpartition("ends: ")[2]
        ended = [nodes.end_of(node) for node in (0, 1)]
        assert [status for status, _, _ in ended] == [0, 0], ended
        assert "NVTE_OF_A_TEST is 0, as in the run (it was not set here)" in ended[1][2]
    assert not read_bad_nodes(tmp_path), "a host is not to blame for its software"


@pytest.mark.slow
def test_check_only_starts_no_member(tmp_path, capsys):
    with Nodes(tmp_path, "--check-only", "--json") as nodes:
        for node, facts in enumerate(({}, {}, OTHER)):
            nodes.start(node, facts)
        ended = [nodes.end_of(node) for node in range(3)]
    assert {status for status, _, _ in ended} == {0}
    (shown,) = [output for _, output, _ in ended if output]
    found = json.loads(shown)
    assert [entry["standing"] for entry in found["nodes"]] == ["good", "good", "excluded"]
    assert not segment_root(nodes.run.read_run().run_id).exists()
    assert not list((nodes.run.path / "logs").glob("*slot*")), "no member was started"

    check.show(found["nodes"], found["reason"], 2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["node", "host", "rack"]
    assert lines[2].split()[:2] == ["0", "host0"]
    assert lines[-1] == "ok: 2 nodes to train on, 0 spares, 1 excluded"

    again = deadpool("agent", "--run-dir", str(nodes.run.path), "--node-id", "0", "--check-only")
    assert again.returncode == 2
    assert "is over" in again.stderr


@pytest.mark.slow
def test_check_fails_with_too_few_good_nodes(tmp_path):
    with Nodes(tmp_path, "--check-only", nodes=3, spares=0) as nodes:
        nodes.start(0)
        nodes.start(1)
        nodes.start(2, {"open_files": 256})
        ended = [nodes.end_of(node) for node in range(3)]
    assert {status for status, _, _ in ended} == {1}
    (shown,) = [output for _, output, _ in ended if output]
    assert "node 2: weak: only 256 open files" in shown
    assert "not enough nodes: " in shown.splitlines()[-1]
