"""Files without the process that does the agents' work on them."""

from __future__ import annotations

from pathlib import Path

from deadpool_megatron.cluster.process import file_worker
from deadpool_megatron.cluster.process.files import FileWorker


class DirectFiles(FileWorker):
    """Does everything at once, in the calling loop."""

    async def size(self, path: Path, limit_seconds: float) -> int:
        return file_worker.size(path)

    async def read(self, path: Path, start: int, nbytes: int, limit_seconds: float) -> str:
        return file_worker.read(path, start, nbytes)

    def replace(self, path: Path, text: str | None) -> None:
        file_worker.replace(path, text)

    async def close(self, limit_seconds: float) -> None:
        pass
