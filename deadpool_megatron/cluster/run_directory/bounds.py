"""What an order or a request may have written and removed, by the name alone.

Orders pass under a MAC, but whoever has become one agent, or holds one member, must not thereby
have a word in what other hosts remove. So names are looked at where things are done: dumps lie in
the run directory, and what is removed elsewhere has a name that only this run gives.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from deadpool_megatron.cluster.run_directory.directory import RunDirectory

_EXPORT_NAME = re.compile(r"\d{1,9}(\.[0-9a-f]{8})?\.\d{1,9}")
_GENERATION = re.compile(r"\d+-\d+")
_CHECKPOINT = re.compile(r"iter_\d+")


class OutsideError(ValueError):
    """A path or a name that no order of this run has; one line."""


def export_name(name: str) -> str:
    """The name of an export, which becomes part of those of files. Raises OutsideError."""
    if not _EXPORT_NAME.fullmatch(name):
        raise OutsideError(f"{name[:80]!r} is not the name of an export")
    return name


def export_directory(directory: str, name: str) -> Path:
    """Where an export is written until it is whole, under this name of a directory; the user may
    have named any other one to have it in. Raises OutsideError."""
    path = Path(directory)
    if not path.is_absolute() or path.name != name:
        raise OutsideError(f"{directory!r} is not where this run writes {name}")
    return path


def dump_directory(directory: str, run: RunDirectory) -> str:
    """Where a vault dumps one generation, or several of them. Raises OutsideError."""
    path = Path(directory)
    above = path.parent if _GENERATION.fullmatch(path.name) else path
    # The nodes may have come to the same directory by different links.
    if above != run.dump and os.path.realpath(above) != os.path.realpath(run.dump):
        raise OutsideError(f"{directory!r} is not in the dump directory of this run, {run.dump}")
    return directory


def check_save(temporary: Path, final: Path) -> None:
    """Where a save was written, and the name it is to get. Raises OutsideError."""
    if temporary == final:
        return  # written in place: nothing of it is moved or removed
    epoch = temporary.name.removeprefix(f".{final.name}.epoch")
    if (
        temporary.parent != final.parent
        or not _CHECKPOINT.fullmatch(final.name)
        or not (epoch.isdigit() and temporary.name == f".{final.name}.epoch{epoch}")
    ):
        raise OutsideError(f"{temporary} is not where a save to {final} is written")


def is_checkpoint(path: Path) -> bool:
    """Whether it has the name of a checkpoint, which may be pruned as a whole."""
    return path.is_absolute() and bool(_CHECKPOINT.fullmatch(path.name))
