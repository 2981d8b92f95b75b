"""Where an agent looks for its coordinator."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from deadpool_megatron.cluster.agent.coordinator_address import CoordinatorAddress
from deadpool_megatron.cluster.process.files import FileWorker
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, write_json
from tests.common.waiting import until


async def test_a_run_directory_that_hangs_does_not_hold_the_agent_up(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    os.mkfifo(run.coordinator)
    files = FileWorker(tmp_path / "logs", tmp_path / "copied")
    address = CoordinatorAddress(run, files, None, seen=lambda: None)
    began = time.monotonic()
    for _ in range(3):
        assert address.newest() is None
        await asyncio.sleep(0.1)
    assert time.monotonic() - began < 2.0
    writer = os.open(run.coordinator, os.O_WRONLY)  # somebody waits to read
    write_json(run.coordinator, {"host": "here", "port": 7})
    os.close(writer)
    await until(lambda: address.newest() == ("here", 7))
    await files.close(1.0)


async def test_the_newest_that_is_known_counts(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    seen: list[tuple[str, int]] = []
    fixed = ("fixed", 1)
    files = FileWorker(tmp_path / "logs", tmp_path / "copied")
    address = CoordinatorAddress(run, files, fixed, seen=lambda: seen[-1] if seen else None)
    assert address.newest() == fixed
    write_json(run.coordinator, {"host": "told", "port": 2})
    await until(lambda: address.newest() == ("told", 2))
    run.coordinator.write_text("{")
    await asyncio.sleep(0.05)
    assert address.newest() == ("told", 2), "what cannot be read says nothing"
    seen.append(("seen", 3))
    assert address.newest() == ("seen", 3)
    await files.close(1.0)
