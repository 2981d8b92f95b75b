"""The extras of each role beside a checkpoint, in files ``deadpool-extras-ROLE-of-N`` of their own.

Megatron's formats keep random states by pipeline and tensor rank, and neither running sums nor
buffers that are not persistent. A role's file holds what a generation holds, encoded, and its
checksum. Stock Megatron reads none of them.
"""

from __future__ import annotations

import re
from pathlib import Path

from deadpool_megatron.file_systems import write_text
from deadpool_megatron.vault.shm.segment import checksum

_NAME = re.compile(r"deadpool-extras-\d+-of-(\d+)")
_DIGEST_BYTES = 8
# Of the formats torch_dist and torch.
_SHARDS = ("*.distcp", "mp_rank_*/*.pt")


class ExtrasFileError(Exception):
    """The file is not there or does not hold what was written; one line."""


def path_in(checkpoint: Path, role: int, roles: int) -> Path:
    """Return where the extras of a role of so many lie."""
    return checkpoint / f"deadpool-extras-{role}-of-{roles}"


def with_checksum(extras: bytes | memoryview) -> bytes:
    """The content of a file with these encoded extras."""
    return bytes(extras) + checksum(memoryview(extras)).to_bytes(_DIGEST_BYTES, "little")


def write(checkpoint: Path, role: int, roles: int, extras: bytes) -> None:
    """Write the file of a role. Raises OSError."""
    write_text(path_in(checkpoint, role, roles), with_checksum(extras))


def read(checkpoint: Path, role: int, roles: int) -> bytes | None:
    """The encoded extras of a role; None where the checkpoint has none for so many roles, or where
    shards were written after them: a run without such files has saved under the same name.

    Raises ExtrasFileError for a damaged file, and for one that is missing among those of others.
    """
    found = [path for path in files_in(checkpoint) if path.name.endswith(f"-of-{roles}")]
    shards = [path for pattern in _SHARDS for path in checkpoint.glob(pattern)]
    # Each process writes its extras after its shards: clocks of other hosts have no part in this.
    if not found or _newest(shards) > _newest(found):
        return None
    path = path_in(checkpoint, role, roles)
    if trouble := trouble_with(path):
        raise ExtrasFileError(f"{path}: {trouble}")
    return path.read_bytes()[:-_DIGEST_BYTES]


def files_in(checkpoint: Path) -> list[Path]:
    """The files of extras in a checkpoint, of any number of roles."""
    return sorted(path for path in checkpoint.glob("*") if _NAME.fullmatch(path.name))


def _newest(paths: list[Path]) -> float:
    return max((path.stat().st_mtime for path in paths), default=0.0)


def lacks_some(checkpoint: Path) -> bool:
    """Return whether only some roles have their file: a save that was cut short."""
    numbers = [int(path.name.rpartition("-")[2]) for path in files_in(checkpoint)]
    return any(numbers.count(number) < number for number in numbers)


def trouble_with(path: Path) -> str:
    """Return why a file does not hold what was written; empty if it does."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return error.strerror or str(error)
    return "" if content == with_checksum(content[:-_DIGEST_BYTES]) else "is damaged"
