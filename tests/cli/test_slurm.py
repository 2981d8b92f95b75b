"""What Slurm drains is drained in the run, once."""

from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli import slurm
from deadpool_megatron.cli.common import CommandError, RunNotReachable
from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from tests.cli.start.refused import old_run

WAITS = "waits for a spare node"


@pytest.fixture
def sinfo(tmp_path, monkeypatch):
    """A stand-in: what is written into it is run."""
    path = tmp_path / "bin" / "sinfo"
    path.parent.mkdir()
    path.touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    return path


def says(sinfo: Path, *lines: str) -> None:
    sinfo.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))


def test_a_drain_is_passed_on_once_and_its_wait_for_a_spare_is_told(tmp_path, sinfo, capsys):
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
    follower.poll()
    assert sent == [], "of other nodes nothing is said"
    says(sinfo, "a1|allocated", "a2|draining@", "a2|draining@")
    for _ in range(5):
        follower.poll()
    assert answers == [], "until it is done, and not again"
    assert len({one["token"] for one in sent}) == 1
    assert {(one["command"], one["node"]) for one in sent} == {("drain", 1)}
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        "the run does not know yet that Slurm drains a2: nobody answers",
        f"Slurm drains a2: node 1 is drained: {WAITS}",
        "Slurm drains a2: node 1 is drained: done",
    ]


def test_slurm_that_does_not_answer_is_named(sinfo, monkeypatch):
    sinfo.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(CommandError, match="status 1: Unable to contact slurm controller"):
        slurm.drained_hosts()
    monkeypatch.setattr(slurm, "_ANSWER_SECONDS", 0.2)
    sinfo.write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(CommandError, match=r"no answer within 0\.2 s"):
        slurm.drained_hosts()


def test_a_host_without_slurm_follows_nothing(tmp_path, complain, monkeypatch):
    run = old_run(tmp_path / "old")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "sinfo" in complain("follow-slurm", str(run.path))
