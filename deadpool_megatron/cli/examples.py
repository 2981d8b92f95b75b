"""Prints the folder that holds configs/ (models for `deadpool plan`, arguments for the embedded
trainer and for pretrain_gpt.py, dashboard, alerts, health commands) and scripts/ (Slurm, ssh,
Kubernetes). The commands in the documentation need a copy of them in the current folder; a
checkout has them.

examples:
  cp -rn "$(deadpool examples)"/{configs,scripts} .
  deadpool plan configs/65b.yaml
  $EDITOR scripts/slurm/pretrain_65b.sbatch

exit status: 0 done; 2 the files are missing: one line names the folders that were searched
"""

from __future__ import annotations

import argparse
import importlib.resources
from pathlib import Path

import deadpool_megatron
from deadpool_megatron.cli.common import CommandError

# The folder is recognized by this file.
_MARKER = "configs/tiny.args"


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    """Add nothing."""


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool examples``. Raises CommandError if the files are missing."""
    del args
    if (marker := find_shipped(_MARKER)) is None:
        roots = ", ".join(map(str, shipped_roots()))
        raise CommandError(f"{_MARKER} is missing: install the package again (looked in {roots})")
    print(marker.parents[1])
    return 0


def shipped_roots() -> list[Path]:
    """Return the folders that may hold configs/, patches/ and scripts/, in the order of search:
    the data of an installed package (setup.py copies them), then the checkout."""
    package = Path(str(importlib.resources.files(deadpool_megatron)))
    return [package / "share", package.parent]


def find_shipped(name: str) -> Path | None:
    """Return the path of a file like ``configs/tiny.args``, in the first folder that has it; None
    if there is none."""
    return next((root / name for root in shipped_roots() if (root / name).is_file()), None)
