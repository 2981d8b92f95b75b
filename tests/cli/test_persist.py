"""``deadpool persist``: what is said of an order, of its end, and of one that comes to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli import persist


class Coordinator:
    """Answers the order, then one status after the other."""

    def __init__(self, *exports: dict[str, Any]) -> None:
        self.exports = list(exports)
        self.asked: list[dict[str, Any]] = []

    def __call__(self, _run: Any, message: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(message)
        if message["command"] == "persist":
            return {"ok": True, "directory": message["directory"] or "/run/exports"}
        export = self.exports.pop(0) if len(self.exports) > 1 else self.exports[0]
        return {"ok": True, "status": {"export": export}}


WRITING = {"asked": True, "now": {"iteration": 8, "step": "writing"}, "last": {}}


def command(monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator, *arguments: str) -> int:
    monkeypatch.setattr(persist, "ask", coordinator)
    monkeypatch.setattr(persist, "_LOOK_SECONDS", 0.001)
    return cli.main(["persist", *arguments])


def test_an_order_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator = Coordinator(WRITING)
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, coordinator, str(tmp_path), "there") == 0
    assert coordinator.asked == [{"command": "persist", "directory": str(tmp_path / "there")}]
    assert f"will be written to {tmp_path / 'there'}" in capsys.readouterr().out


def test_waiting_ends_with_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {"iteration": 8, "path": "/run/exports/iter_0000008", "error": ""}
    coordinator = Coordinator(WRITING, {"asked": False, "now": {}, "last": last})
    assert command(monkeypatch, coordinator, str(tmp_path), "--wait", "9") == 0
    assert capsys.readouterr().out == "iteration 8 is in /run/exports/iter_0000008\n"


def test_what_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last = {"iteration": 8, "path": "", "error": "node 1 was lost"}
    coordinator = Coordinator({"asked": False, "now": {}, "last": last})
    assert command(monkeypatch, coordinator, str(tmp_path), "--wait", "9") == 2
    wanted = "deadpool persist: no checkpoint of iteration 8: node 1 was lost\n"
    assert capsys.readouterr().err == wanted
    assert command(monkeypatch, Coordinator(WRITING), str(tmp_path), "--wait", "0.01") == 2
    assert "no checkpoint within 0.01 s (writing iteration 8)" in capsys.readouterr().err


def test_without_a_run_it_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["persist", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
