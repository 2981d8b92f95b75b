"""What the next start of a run goes on from, as ``latest.json`` says."""

from __future__ import annotations

from pathlib import Path

from deadpool_megatron.cluster.run_directory.directory import DAMAGE, read_json
from deadpool_megatron.layout.records import Restore


def read_latest(latest: Path) -> Restore:
    """Raises OSError, and ValueError when the file is damaged."""
    try:
        return Restore.from_dict(read_json(latest))
    except DAMAGE as error:
        raise ValueError(f"{latest} is damaged: {error!r}") from error
