"""The extras of each role in a checkpoint, in separate files ``deadpool-extras-ROLE-of-N``.

Megatron's formats keep random states by pipeline and tensor rank, and neither running sums nor
non-persistent buffers. A role's file holds the encoded extras of a generation, and their checksum.
Stock Megatron reads none of these files.
"""

from __future__ import annotations

import re
from pathlib import Path

from deadpool_megatron.file_systems import write_text
from deadpool_megatron.vault.shm.segment import checksum

_NAME = re.compile(r"deadpool-extras-\d+-of-(\d+)")
_DIGEST_BYTES = 8
# Shards of the formats torch_dist and torch.
_SHARDS = ("*.distcp", "mp_rank_*/*.pt")


class ExtrasFileError(Exception):
    """The error of a missing or damaged file; one line."""


def path_in(checkpoint: Path, role: int, roles: int) -> Path:
    """Return the path of the extras of a role, in a run with ``roles`` roles."""
    return checkpoint / f"deadpool-extras-{role}-of-{roles}"


def with_checksum(extras: bytes | memoryview) -> bytes:
    """Return the content of a file with these encoded extras."""
    return bytes(extras) + checksum(memoryview(extras)).to_bytes(_DIGEST_BYTES, "little")


def write(checkpoint: Path, role: int, roles: int, extras: bytes) -> None:
    """Write the file of a role. Raises OSError."""
    write_text(path_in(checkpoint, role, roles), with_checksum(extras))


def read(checkpoint: Path, role: int, roles: int) -> bytes | None:
    """Return a role's encoded extras; None if the checkpoint has none for that number of roles, or
    if its shards are newer: then a run that writes no such files has saved under the same name.

    Raises ExtrasFileError for a damaged file, or if only other roles have their files.
    """
    found = [path for path in files_in(checkpoint) if path.name.endswith(f"-of-{roles}")]
    shards = [path for pattern in _SHARDS for path in checkpoint.glob(pattern)]
    # Each process writes its extras after its shards, so clocks of other hosts do not matter.
    if not found or _newest(shards) > _newest(found):
        return None
    path = path_in(checkpoint, role, roles)
    if problem := problem_in(path):
        raise ExtrasFileError(f"{path}: {problem}")
    return path.read_bytes()[:-_DIGEST_BYTES]


def role_count(checkpoint: Path) -> int | None:
    """Return the number of roles of the run that wrote the newest file; None without files."""
    newest = max(files_in(checkpoint), key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else int(newest.name.rpartition("-")[2])


def files_in(checkpoint: Path) -> list[Path]:
    """Return the files of extras in a checkpoint, for any number of roles."""
    return sorted(path for path in checkpoint.glob("*") if _NAME.fullmatch(path.name))


def _newest(paths: list[Path]) -> float:
    return max((path.stat().st_mtime for path in paths), default=0.0)


def lacks_some(checkpoint: Path) -> bool:
    """Return whether the files of some roles are missing, as after an interrupted save."""
    numbers = [int(path.name.rpartition("-")[2]) for path in files_in(checkpoint)]
    return any(numbers.count(number) < number for number in numbers)


def problem_in(path: Path) -> str:
    """Return the reason why a file cannot be used; empty if its content matches its checksum."""
    try:
        content = path.read_bytes()
    except OSError as error:
        return error.strerror or str(error)
    return "" if content == with_checksum(content[:-_DIGEST_BYTES]) else "is damaged"
