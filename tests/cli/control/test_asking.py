"""Requests of every kind: what is printed of them, how long they are waited for, exit statuses."""

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.common import NotNow, RequestRefused, RunNotReachable
from deadpool_megatron.cli.control import asking
from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from deadpool_megatron.layout.schemes import ProtectionPlan

WHAT: dict[str, dict[str, Any]] = {
    "drain": {"node": 1},
    "protect": {"plan": ProtectionPlan().to_dict(), "words": "buddy"},
    "persist": {"directory": "/run/exports"},
    "stop": {"dump": True, "keeps": True, "reason": "stopped"},
}
Answer = tuple[Stage, str] | Exception


class Coordinator:
    """Gives one answer after the other, the last one for ever."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def __call__(self, _run: Any, message: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(dict(message))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        verb = Verb(message["command"])
        request = Request(3, message["token"], verb, WHAT[verb], *answer)
        return {"ok": True, "request": request.to_dict()}


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Give a command to a coordinator; answers its status, and what it printed."""

    def give(coordinator: Coordinator, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(asking, "ask", coordinator)
        for name in ("_LOOK_SECONDS", "_REPEAT_SECONDS", "_PAUSE_SECONDS"):
            monkeypatch.setattr(asking, name, 0.001)
        monkeypatch.setattr(asking, "_TAKEOVER_SECONDS", 0.05)
        name, *rest = arguments
        status = cli.main([name, str(tmp_path), *rest])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return give


ASKED, UNDER_WAY = (Stage.ASKED, ""), (Stage.UNDER_WAY, "waits for a spare node")
NOBODY = RunNotReachable("no coordinator")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("drain", "--node", "1"), "drain of node 1"),
        (("protect", "--every", "3"), "protection buddy"),
        (("persist",), "checkpoint in /run/exports"),
    ],
)
def test_waiting_ends_with_the_outcome(command: Any, arguments: tuple[str, ...], what: str) -> None:
    coordinator = Coordinator(ASKED, UNDER_WAY, NOBODY, UNDER_WAY, (Stage.DONE, "so it is"))
    waits = f"{what}, under way: waits for a spare node\n"
    # The first is told before the first wait.
    said = f"{what}: done: so it is\n{what}, asked\n{waits}"
    assert command(coordinator, *arguments, "--wait") == (0, said)
    tokens = {message["token"] for message in coordinator.asked}
    assert (len(coordinator.asked), len(tokens)) == (5, 1), "the same request again"
    refused = Coordinator(UNDER_WAY, (Stage.REFUSED, "node 1 was lost"))
    said = f"{waits}deadpool {arguments[0]}: refused: node 1 was lost\n"
    assert command(refused, *arguments, "--wait", "60") == (1, said)
    status, said = command(Coordinator(UNDER_WAY), *arguments, "--wait", "0.01")
    assert status == 5
    assert "not done within 0.01 s: under way, waits for a spare node; it continues" in said


@pytest.mark.parametrize("wait", [(), ("--wait",)])
def test_what_is_refused_at_once(command: Any, wait: tuple[str, ...]) -> None:
    coordinator = Coordinator(RequestRefused("node 1 is not connected"))
    status, said = command(coordinator, "drain", "--node", "1", *wait)
    assert (status, said) == (1, "deadpool drain: refused: node 1 is not connected\n")


def test_a_dump_that_could_not_be_written_is_no_refusal(command: Any) -> None:
    coordinator = Coordinator(UNDER_WAY, (Stage.FAILED, "the state stays in memory"))
    status, said = command(coordinator, "stop", "--dump", "--wait")
    assert (status, said.splitlines()[-1]) == (
        1,
        "deadpool stop: the run has ended: the state stays in memory",
    )


def test_a_journal_that_does_not_work_is_waited_for(command: Any) -> None:
    trouble = NotNow("the journal cannot be read: nothing was taken on, ask again")
    coordinator = Coordinator(trouble, UNDER_WAY, trouble, (Stage.DONE, ""))
    status, said = command(coordinator, "drain", "--node", "1", "--wait")
    told = f"deadpool drain: {trouble}; tried again\n"
    waits = "drain of node 1, under way: waits for a spare node\n"
    assert (status, said) == (0, f"drain of node 1: done\n{told}{waits}")
    assert len({message["token"] for message in coordinator.asked}) == 1
    status, said = command(Coordinator(trouble), "drain", "--node", "1")
    assert status == 2
    assert f"{trouble}\n" in said


def list_agent(run: Path, pid: int) -> None:
    """One node of this host."""
    (run / "nodes").mkdir()
    write_json(run / "nodes" / "0.json", {"hostname": socket.gethostname(), "agent": pid})


@pytest.mark.parametrize("arguments", [("stop",), ("drain", "--node", "1")])
def test_what_nobody_can_take_is_not_waited_for(
    command: Any, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """The agent of this host has ended, so that no other coordinator can come."""
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    list_agent(tmp_path, gone.pid)
    said = f"deadpool {arguments[0]}: {NOBODY}\n"
    assert command(Coordinator(NOBODY), *arguments, "--wait") == (2, said)


def test_a_coordinator_that_is_being_replaced_is_waited_for(command: Any, tmp_path: Path) -> None:
    list_agent(tmp_path, os.getpid())
    coordinator = Coordinator(NOBODY, NOBODY, ASKED)
    status, said = command(coordinator, "drain", "--node", "1")
    assert status == 0
    assert said.count("tried again") == 1
    assert len({message["token"] for message in coordinator.asked}) == 1


def test_a_run_that_ends_meanwhile(command: Any, tmp_path: Path) -> None:
    write_json(
        RunDirectory(tmp_path).final, {"exit_status": 75, "reason": "enough", "iterations": 9}
    )
    over = "over, exit status 75: enough; 9 iterations"
    assert command(Coordinator(NOBODY), "stop", "--wait") == (0, over + "\n")
    refused = f"deadpool drain: refused: the run is {over}\n"
    told = f"drain of node 1, asked\n{refused}"
    assert command(Coordinator(ASKED, NOBODY), "drain", "--node", "1", "--wait") == (1, told)


@pytest.mark.parametrize(
    ("arguments", "part", "number"),
    [
        (("--node", "0"), "node", 0),
        (("--role", "3"), "role", 3),
        (("--vault", "1"), "vault", 1),
        (("--agent", "0"), "agent", 0),
        (("--coordinator",), "coordinator", None),
    ],
)
def test_every_part_can_be_killed(
    arguments: tuple[str, ...], part: str, number: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Again where a coordinator has just gone, or come."""
    asked: list[Any] = []

    def ask(_run: Any, message: dict[str, Any]) -> None:
        asked.append(message)
        if len(asked) == 1:
            raise NotNow("the coordinator has just taken over")

    monkeypatch.setattr(asking, "ask", ask)
    monkeypatch.setattr(asking, "may_be_alive", lambda _run: True)
    assert cli.main(["kill", "run", *arguments, "--signal", "STOP"]) == 0
    assert asked == 2 * [{"command": "kill", "part": part, "number": number, "signal": "STOP"}]


def test_where_a_checkpoint_is_to_go(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(ASKED)
    monkeypatch.chdir(tmp_path)
    assert command(coordinator, "persist", "there")[0] == 0
    assert coordinator.asked[0]["directory"] == str(tmp_path / "there")


def test_the_time_that_a_run_has_goes_by(command: Any) -> None:
    coordinator = Coordinator(UNDER_WAY)
    assert command(coordinator, "stop", "--dump", "--within", "50")[0] == 0
    assert 49 < coordinator.asked[0]["seconds"] <= 50


@pytest.mark.parametrize(("given", "keeps"), [((), True), (("--discard",), False)])
def test_a_plain_stop_keeps_the_state_in_memory(
    command: Any, given: tuple[str, ...], keeps: bool
) -> None:
    coordinator = Coordinator((Stage.DONE, ""))
    assert command(coordinator, "stop", *given)[0] == 0
    assert (coordinator.asked[-1]["dump"], coordinator.asked[-1]["keeps"]) == (False, keeps)
