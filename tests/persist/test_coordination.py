"""Disks that hang or are slow while exports are removed."""

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator import checkpoints, new_checkpoint
from deadpool_megatron.cluster.run_directory import directory
from deadpool_megatron.layout.records import Generation, Restore
from tests.persist.harness.world import World


def test_a_disk_that_hangs_keeps_no_thread_from_the_rest(tmp_path, monkeypatch):
    """An export that it costs is to be removed there, and the journal needs threads as well."""
    answers = threading.Event()
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda *_, **__: answers.wait(20.0))
    world = World(tmp_path, persist_interval=4)
    world.exports.tick()
    world.report(1, "failed", text="no room")

    async def story() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        (removal,) = map(asyncio.ensure_future, world.tasks)
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5.0):
                await asyncio.to_thread(directory.write_json, world.run.coordinator, {})
        finally:
            answers.set()
            await removal

    asyncio.run(story())


def test_removed_export_cannot_be_published_meanwhile(tmp_path, monkeypatch):
    """By a coordinator that was thought dead while its files were synced."""
    run, final = directory.RunDirectory(tmp_path), tmp_path / "exports" / "iter_0000004"
    left = directory.unfinished_export(final.parent, "id", "1.3")
    left.mkdir(parents=True)
    (left / "__0_0.distcp").touch()
    restore = Restore("durable", Generation(1, 4), "save", str(final))
    rmtree = shutil.rmtree

    def publish_first(path: Path) -> None:
        with pytest.raises(new_checkpoint.DurableError):
            new_checkpoint.NewCheckpoint(left, final, restore, run, "id").publish()
        rmtree(path)

    monkeypatch.setattr(new_checkpoint.shutil, "rmtree", publish_first)
    new_checkpoint.remove_unfinished(final.parent, "id", 2)
    assert list(final.parent.iterdir()) == []
