"""A node's part in exports: the reports of its agent, and dropped exports."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deadpool_megatron.cluster.agent import exporter as agent_exports
from deadpool_megatron.cluster.agent.exporter import NodeExports
from deadpool_megatron.cluster.process.children import ProcessEnd
from deadpool_megatron.cluster.process.logs import LocalLogs
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.layout.records import Generation
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot
from deadpool_megatron.vault.errors import VaultError
from tests.common.wait import until


class SlowVault:
    """A vault that pins when the test lets it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.answers: dict[str, asyncio.Future[list[Snapshot]]] = {}

    async def take(self, name: str, iteration: int, deadline_seconds: float) -> list[Snapshot]:
        del iteration, deadline_seconds
        self._directory.joinpath(f"taken-{name}-0").touch()
        self.answers[name] = asyncio.get_running_loop().create_future()
        return await self.answers[name]


def taken(directory: Path) -> list[Snapshot]:
    return [Snapshot(0, "hash", Generation(1, 4), "step", str(directory / "taken-1.1-0"), {})]


def order(kind: str, name: str) -> dict[str, Any]:
    return {"t": f"export-{kind}", "name": name, "iteration": 4}


def node_of(directory: Path) -> tuple[NodeExports, SlowVault, list[dict[str, Any]]]:
    """Return a node with its vault, and its reports."""
    reports: list[dict[str, Any]] = []
    vault, run = SlowVault(directory), RunDirectory(directory / "run")
    info: Any = SimpleNamespace(settings=Settings(), run_id="id")
    (run.path / "logs").mkdir(parents=True)
    logs = LocalLogs(directory / "logs")
    options: Any = SimpleNamespace(node=0, run=run, info=info, segments=directory)
    exports = NodeExports(options, vault.take, logs, lambda m: reports.append(dict(m)))
    return exports, vault, reports


async def pin_first(exports: NodeExports, vault: SlowVault, reports: list[dict[str, Any]]) -> None:
    """Pin the first export, and wait for the report."""
    exports.order(order("take", "1.1"))
    await until(lambda: "1.1" in vault.answers)
    vault.answers["1.1"].set_result(taken(exports._segments))
    await until(lambda: reports)


async def test_node_reports_pinned_exports_and_forgets_dropped_exports(tmp_path):
    exports, vault, reports = node_of(tmp_path)
    await pin_first(exports, vault, reports)
    assert reports.pop() == {
        "t": "export",
        "name": "1.1",
        "step": "taken",
        "roles": {"0": [[1, 4], "step"]},
    }
    exports.order(order("drop", "0.9"))
    assert list(tmp_path.glob("taken-*")), "another export is to be dropped"
    exports.order(order("drop", "1.1"))
    assert not list(tmp_path.glob("taken-*"))

    exports.order(order("take", "1.2"))
    await until(lambda: "1.2" in vault.answers)
    exports.order(order("take", "1.3"))
    await until(lambda: "1.3" in vault.answers)
    (tmp_path / "taken-1.2-0").touch()  # as by a late vault
    vault.answers["1.2"].set_result(taken(tmp_path))
    await until(lambda: not (tmp_path / "taken-1.2-0").exists())
    assert (tmp_path / "taken-1.3-0").exists()
    vault.answers["1.3"].set_exception(VaultError("no room"))
    await until(lambda: reports)
    failed = {"t": "export", "name": "1.3", "step": "failed", "text": "no room", "code": "failed"}
    assert reports == [failed]
    assert not list(tmp_path.glob("taken-*"))
    await exports.close()


def no_processes(*_: Any, **__: Any) -> Any:
    raise OSError("no more processes")


async def test_an_exporter_that_cannot_be_started_ends_its_export_only(tmp_path, monkeypatch):
    """An error that got out of an order would end the connection, and with it the node."""
    monkeypatch.setattr(agent_exports, "start_child", no_processes)
    (tmp_path / "taken-0.9-0").touch()  # left by a killed agent
    exports, vault, reports = node_of(tmp_path)
    assert not list(tmp_path.glob("taken-*"))
    await pin_first(exports, vault, reports)
    exports.order(
        {**order("write", "1.1"), "directory": str(tmp_path / ".export-id-1.1"), "roles": [0]}
    )
    assert [message["step"] for message in reports] == ["taken", "failed"]
    assert "no more processes" in reports[-1]["text"]
    assert not list(tmp_path.glob("taken-*"))


async def test_failed_exporter_is_reported_with_its_last_output(tmp_path):
    LocalLogs(tmp_path / "logs").log("node0-persist").write_text("ValueError: no room\n")
    exports, _, reports = node_of(tmp_path)
    exports._name = "1.1"
    exports._ended("1.1", tmp_path, ProcessEnd(exit_code=1))
    text = "the exporter ended with exit status 1: ValueError: no room"
    assert (reports[0]["step"], reports[0]["text"]) == ("failed", text)
