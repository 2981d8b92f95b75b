"""Slurm's variables, the wrong ones included; what it drains is drained in the run, once."""

import socket
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli import slurm
from deadpool_megatron.cli.common import CommandError, RunNotReachable, host_address
from deadpool_megatron.cli.slurm import SlurmNode, slurm_environment
from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from tests.cli.start.refused import old_run
from tests.cli.told import Complain

# Taken from a task of Slurm 22.05.
TASK = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "3",
    "SLURM_STEP_NUM_NODES": "6",
    "SLURM_STEP_TASKS_PER_NODE": "1(x6)",
    "SLURMD_NODENAME": "node4",
    "SLURM_TOPOLOGY_ADDR": "core.rack1.node4",
    "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
}


def test_a_task_of_one_per_node() -> None:
    """Its number counts, not that of the node: they differ with --distribution=arbitrary."""
    found = slurm_environment({**TASK, "SLURM_NODEID": "0"})
    assert found == SlurmNode(3, "node4", "rack1")


@pytest.mark.parametrize(
    ("address", "pattern", "domain"),
    [
        ("node4", "node", ""),
        ("", "", ""),
        ("block7.node4", "block.node", "block7"),
        ("s0.s1.host.of.site", "switch.switch.node", "s1"),
    ],
)
def test_domain(address: str, pattern: str, domain: str) -> None:
    names = {"SLURM_TOPOLOGY_ADDR": address, "SLURM_TOPOLOGY_ADDR_PATTERN": pattern}
    assert slurm_environment({**TASK, **names}).domain == domain


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"SLURM_JOB_ID": None}, "no Slurm job"),
        ({"SLURM_STEP_ID": None}, "put 'srun --ntasks-per-node=1' before it"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x5)"}, "several tasks on a node (2(x5))"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3),2"}, "several tasks on a node (1(x3),2)"),
        ({"SLURM_STEP_TASKS_PER_NODE": "many"}, "is 'many'"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'"),
    ],
)
def test_one_line_for_each_way_to_be_wrong(change: dict[str, str | None], told: str) -> None:
    changed = {k: v for k, v in {**TASK, **change}.items() if v is not None}
    with pytest.raises(CommandError, match="--from-slurm") as raised:
        slurm_environment(changed)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_address_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"node4": "10.0.0.4", "debian": "127.0.1.1"}

    def resolve(host: str, *_: object) -> list[object]:
        if host not in answers:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert host_address("node4") == "10.0.0.4"
    with pytest.raises(CommandError, match="which other nodes cannot reach: give --host"):
        host_address("debian")
    with pytest.raises(CommandError, match="is not known"):
        host_address("nowhere")


WAITS = "waits for a spare node"


@pytest.fixture
def sinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in: what is written into it is run."""
    path = tmp_path / "bin" / "sinfo"
    path.parent.mkdir()
    path.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    return path


def says(sinfo: Path, *lines: str) -> None:
    sinfo.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))


def test_a_drain_is_passed_on_once_and_its_wait_for_a_spare_is_told(
    tmp_path: Path, sinfo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, sent = RunDirectory(tmp_path / "r"), []
    (run.path / "nodes").mkdir(parents=True)
    for node, host in enumerate(("a1.cluster", "a2.cluster")):
        write_json(run.node(node), {"agent": 1, "hostname": host})
    answers: list[Any] = [
        RunNotReachable("nobody answers"),
        (Stage.ASKED, WAITS),
        (Stage.ASKED, WAITS),
        (Stage.DONE, ""),
    ]

    def tell(message: dict[str, Any]) -> dict[str, Any]:
        sent.append(message)
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        known = Request(1, message["token"], Verb.DRAIN, {"node": message["node"]}, *answer)
        return {"request": known.to_dict()}

    follower = slurm.SlurmFollower(run, slurm.drained_hosts, tell)
    says(sinfo, "a1|allocated", "a2|mixed", "b3|drained")
    follower.look()
    assert sent == [], "of other nodes nothing is said"
    says(sinfo, "a1|allocated", "a2|draining@", "a2|draining@")
    for _ in range(5):
        follower.look()
    assert answers == [], "until it is done, and not again"
    assert len({one["token"] for one in sent}) == 1
    assert {(one["command"], one["node"]) for one in sent} == {("drain", 1)}
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        "the run does not know yet that Slurm drains a2: nobody answers",
        f"Slurm drains a2: node 1 is drained: {WAITS}",
        "Slurm drains a2: node 1 is drained: done",
    ]


def test_slurm_that_does_not_answer_is_named(sinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(CommandError, match="status 1: Unable to contact slurm controller"):
        slurm.drained_hosts()
    monkeypatch.setattr(slurm, "_ANSWER_SECONDS", 0.2)
    sinfo.write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(CommandError, match=r"no answer within 0\.2 s"):
        slurm.drained_hosts()


def test_a_host_without_slurm_follows_nothing(
    tmp_path: Path, complain: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = old_run(tmp_path / "old")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sinfo" in complain("follow-slurm", str(run.path))
