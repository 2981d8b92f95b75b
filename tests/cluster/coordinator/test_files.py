"""The file by which a run is found."""

import asyncio

from deadpool_megatron.cluster.coordinator import files as run_files
from deadpool_megatron.cluster.coordinator.files import RunFiles
from deadpool_megatron.cluster.coordinator.progress import ReportedProgress
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.settings import Settings


async def test_removed_run_file_is_created_again(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "_PAUSE_SECONDS", 0.01)
    run = RunDirectory(tmp_path / "run")
    whole = RunInfo("0123abcd", 1, 1, 0, 1, ("x.py",), Settings())
    run.create(whole)
    files = RunFiles(run, whole, 1, ReportedProgress())
    keeping = asyncio.create_task(files.keep_name(lambda: None))
    async with asyncio.timeout(20):
        await asyncio.sleep(0.05)
        (run.path / "run.json").unlink()
        while not (run.path / "run.json").exists():
            await asyncio.sleep(0.01)
    keeping.cancel()
    assert run.read_run() == whole
    files.close(10.0)
