"""The archive of a run: its results and logs so far, results first."""

from __future__ import annotations

import io
import tarfile
from contextlib import suppress
from pathlib import Path

# Limit before compression: with incompressible data too, the archive stays below 16 MiB.
_MAX_BYTES = 12 << 20
#: kept of the end of a log
_TAIL_BYTES = 128 << 10
_KEPT = {".json", ".jsonl", ".log"}


def pack(folder: Path, archive: Path) -> None:
    """Replace the archive atomically: all results, and the ends of all logs."""
    unfinished = archive.with_suffix(".part")
    free_bytes = _MAX_BYTES
    results = sorted(folder.glob("*.json"))
    logs = {path for path in folder.rglob("*") if path.suffix in _KEPT} - {*results}
    with tarfile.open(unfinished, "w:gz", compresslevel=6) as tar:
        for path in [*results, *sorted(logs, key=lambda log: (len(log.parts), log))]:
            with suppress(OSError):  # gone meanwhile
                data = path.read_bytes()
                data = data if path in results else data[-_TAIL_BYTES:]
                if len(data) <= free_bytes:
                    free_bytes -= len(data)
                    entry = tarfile.TarInfo(f"proof/{path.relative_to(folder)}")
                    entry.size, entry.mtime = len(data), int(path.stat().st_mtime)
                    tar.addfile(entry, io.BytesIO(data))
    unfinished.replace(archive)
