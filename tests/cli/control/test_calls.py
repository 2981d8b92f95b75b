"""What is asked of a coordinator by a user and what comes of it, line by line; see calls/."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.control import client
from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.layout.schemes import ProtectionPlan
from tests.common.calls import test_calls_are_answered_as_before  # noqa: F401

WHAT: dict[str, dict[str, Any]] = {
    "drain": {"node": 1},
    "protect": {"plan": ProtectionPlan().to_dict(), "words": "buddy"},
    "persist": {"directory": "/run/exports"},
    "stop": {"dump": True, "keeps": True, "reason": "stopped"},
}


class Coordinator:
    """Gives one answer after the other, the last one for ever."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.asked = list[dict[str, Any]]()
        self._answers = list[Any]()
        patch.chdir(directory)
        patch.setattr(client.common, "ask", self._answer)
        for name in ("_POLL_SECONDS", "_REPEAT_SECONDS", "_PAUSE_SECONDS"):
            patch.setattr(client, name, 0.001)
        patch.setattr(client, "_TAKEOVER_SECONDS", 0.05)

    def hears(self, line: str, *answers: Any) -> int:
        self._answers, self.asked = list(answers), []
        return cli.main(shlex.split(line))

    def heard(self) -> tuple[int, int, dict[str, Any]]:
        """How many messages, how many requests, and what is in the last one."""
        *_, last = self.asked
        tokens = {message.get("token") for message in self.asked}
        return len(self.asked), len(tokens), {k: v for k, v in last.items() if k != "token"}

    def _answer(self, _run: Any, message: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(dict(message))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        verb = Verb(message["command"])
        request = Request(3, message["token"], verb, WHAT[verb], *answer)
        return {"ok": True, "request": request.to_dict()}


ASKED, UNDER_WAY = (Stage.ASKED, ""), (Stage.UNDER_WAY, "waits for a spare node")
