"""A node without a number asks until it has one: what goes wrong for a moment does not end it."""

from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli.common import CommandError, RequestRefused, RunNotReachable
from deadpool_megatron.cli.start import agent_process
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.run_directory import directory
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.ownership import OwnershipError
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.auth import AuthenticationError


class Coordinator:
    """Fails twice, then gives a number."""

    def __init__(self, failure: Exception) -> None:
        self.failures = [failure, failure]

    def __call__(self, *_: object) -> dict[str, Any]:
        if self.failures:
            raise self.failures.pop()
        return {"ok": True, "node": 7}


def attach(run: Path, monkeypatch: pytest.MonkeyPatch, coordinator: Coordinator) -> int:
    monkeypatch.setattr(agent_process.common, "ask", coordinator)
    monkeypatch.setattr(agent_process, "_ATTACH_PAUSE_SECONDS", 0.0)
    settings = Settings(spare_timeout_seconds=60.0)
    info = directory.RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), settings)
    return agent_process._attach(directory.RunDirectory(run), info, None)


@pytest.mark.parametrize(
    "failure",
    [
        RunNotReachable("no coordinator"),
        CommandError("cannot read journal: Input/output error"),
        directory.RunDirectoryError("run.json: Stale file handle"),
        OwnershipError("run cannot be looked at: Input/output error"),
        AuthenticationError("no run secret"),
        OSError("Stale file handle"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_what_passes_is_sat_out(tmp_path, monkeypatch, failure):
    assert attach(tmp_path, monkeypatch, Coordinator(failure)) == 7


def test_a_fenced_node_comes_back_though_the_file_of_domains_is_away(tmp_path, monkeypatch):
    """What cuts a host off takes its file systems as well, for a moment longer."""
    table, run = tmp_path / "domains", directory.RunDirectory(tmp_path / "run")
    table.write_text("3 rack-a\n7 rack-b\n")
    settings = Settings(spare_timeout_seconds=60.0, domains_file=str(table))
    info = directory.RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), settings)
    served: list[tuple[int, str]] = []

    def serve_once(options: AgentOptions) -> int:
        table.unlink(missing_ok=True)
        served.append((options.node, options.domain))
        return 0 if options.node == 7 else ExitStatus.FENCED

    monkeypatch.setattr(agent_process, "run_agent", serve_once)
    monkeypatch.setattr(agent_process.common, "ask", lambda *_: {"ok": True, "node": 7})
    options = AgentOptions(3, run, info, b"", "127.0.0.1", "")
    status = agent_process.serve(options, standby_port=None, rejoins=1)
    assert (status, served) == (0, [(3, "rack-a"), (7, "rack-b")])


def test_a_refusal_is_the_last_word(tmp_path, monkeypatch):
    coordinator = Coordinator(RequestRefused("not this one"))
    with pytest.raises(RequestRefused, match="not this one"):
        attach(tmp_path, monkeypatch, coordinator)
    assert len(coordinator.failures) == 1


def test_a_run_that_is_over_takes_nobody(tmp_path, monkeypatch):
    directory.write_json(directory.RunDirectory(tmp_path).final, {"exit_status": 0})
    coordinator = Coordinator(CommandError("cannot read journal: Input/output error"))
    with pytest.raises(CommandError, match="cannot attach: cannot read journal"):
        attach(tmp_path, monkeypatch, coordinator)
    assert len(coordinator.failures) == 1
