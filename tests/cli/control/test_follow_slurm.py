"""What Slurm drains is drained in the run, by one request for each node, and people are told."""

from __future__ import annotations

import argparse
import errno
import itertools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli import common
from deadpool_megatron.cli.common import CommandError, RunNotReachable
from deadpool_megatron.cli.control import follow_slurm
from deadpool_megatron.cluster.journal.requests import Request, Stage, Verb
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunDirectoryError,
    RunInfo,
    write_json,
)
from deadpool_megatron.settings import Settings

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

    follower = follow_slurm.Follower(run, follow_slurm.drained_hosts, tell)
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


def test_it_outlives_a_run_directory_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, final, asked = RunDirectory(tmp_path / "r"), tmp_path / "r" / "final.json", []
    info = RunInfo("0123abcd", 1, 1, 0, 1, ("x.py",), Settings(), "/dev/shm/x")
    run.create(info)
    write_json(run.node(1), {"agent": 1, "hostname": "a2"})
    exists = Path.exists

    def is_away(path: Path) -> bool:
        if path == final and len(asked) < 2:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return exists(path)

    def ask(_: RunDirectory, message: dict[str, Any]) -> dict[str, Any]:
        asked.append(message)
        if len(asked) == 1:
            raise RunDirectoryError("r/run.json: Stale file handle")
        final.touch()
        known = Request(1, message["token"], Verb.DRAIN, {"node": 1}, Stage.DONE)
        return {"request": known.to_dict()}

    monkeypatch.setattr(Path, "exists", is_away)
    monkeypatch.setattr(follow_slurm, "ask", ask)
    monkeypatch.setattr(follow_slurm, "drained_hosts", lambda: frozenset({"a2"}))
    monkeypatch.setattr(follow_slurm.time, "monotonic", itertools.count(0, 60).__next__)
    assert follow_slurm.run(argparse.Namespace(run_dir=run.path, every=1.0)) == 0
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        "the run does not know yet that Slurm drains a2: r/run.json: Stale file handle",
        "Slurm drains a2: node 1 is drained: done",
    ]


def test_a_journal_that_does_not_work_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "r")
    (run.path / "nodes").mkdir(parents=True)
    write_json(run.node(1), {"agent": 1, "hostname": "a2"})
    waits = Request(1, "a", Verb.DRAIN, {"node": 1}, Stage.ASKED, WAITS)
    answers = [
        {"ok": False, "again": True, "error": "the journal cannot be read"},
        {"ok": True, "request": waits.to_dict()},
    ]
    monkeypatch.setenv("DEADPOOL_SECRET", "0123456789abcdef")
    monkeypatch.setattr(common.auth, "connect", lambda *_: nullcontext())
    monkeypatch.setattr(common.framing, "send", lambda *_: None)
    monkeypatch.setattr(common.framing, "receive", lambda _: answers.pop(0))

    def tell(message: dict[str, Any]) -> dict[str, Any]:
        return common.ask_at(("127.0.0.1", 1), run, "0123abcd", message, Settings())

    follower = follow_slurm.Follower(run, lambda: frozenset({"a2"}), tell)
    follower.look()
    follower.look()
    assert answers == [], "it asks again"
    assert [line[10:] for line in capsys.readouterr().out.splitlines()] == [
        "the run does not know yet that Slurm drains a2: the journal cannot be read",
        f"Slurm drains a2: node 1 is drained: {WAITS}",
    ]


def test_slurm_that_does_not_answer_is_named(sinfo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sinfo.write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    with pytest.raises(CommandError, match="status 1: Unable to contact slurm controller"):
        follow_slurm.drained_hosts()
    monkeypatch.setattr(follow_slurm, "_ANSWER_SECONDS", 0.2)
    sinfo.write_text("#!/bin/sh\nexec sleep 1000\n")
    with pytest.raises(CommandError, match=r"no answer within 0\.2 s"):
        follow_slurm.drained_hosts()
