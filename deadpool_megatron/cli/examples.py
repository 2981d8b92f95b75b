"""``deadpool examples``: argument files, plans and batch scripts that come with the package, and
where an installation has such files, which are no modules (patch sets are others)."""

from __future__ import annotations

import argparse
import os
import shutil
import site
import sys
import sysconfig
from pathlib import Path

import deadpool_megatron
from deadpool_megatron.cli.common import CommandError

_DESCRIPTION = """\
Copies configs/ (models for `deadpool plan`, arguments for the embedded trainer and for
pretrain_gpt.py, dashboard, alerts, health commands) and scripts/ (Slurm, ssh, Kubernetes) into DIR,
so that commands of the documentation that name them work there. A checkout has them already.
"""
_EXAMPLES = """\
examples:
  deadpool examples                     into this directory
  deadpool plan configs/65b.yaml
  $EDITOR scripts/slurm/pretrain_65b.sbatch

exit status: 0 done, or everything is there; 2 refused, one line says why
"""
# A file by which the root of each folder is known.
_FOLDERS = {
    "configs": "configs/tiny.args",
    "scripts/slurm": "scripts/slurm/job.sh",
    "scripts/launch": "scripts/launch/ssh.sh",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``examples`` to the commands."""
    parser = subparsers.add_parser(
        "examples",
        help="copy example configs and batch scripts here",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "directory", type=Path, nargs="?", default=Path(), metavar="DIR", help="(default: here)"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool examples``. Raises CommandError before anything is written."""
    new = []
    for name, source in _files().items():
        target = args.directory / name
        if not os.path.lexists(target):
            new.append((name, source, target))
        elif not target.is_file() or target.read_bytes() != source.read_bytes():
            raise CommandError(f"{target} is there and differs: name an empty directory")
    try:
        for name, source, target in new:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
            print(name)
    except OSError as error:
        raise CommandError(f"cannot write to {args.directory}: {error}") from error
    if not new:
        print("everything is there already")
    return 0


def shipped_roots() -> list[Path]:
    """Return where such files can be, under their names in the repository.

    First beside the package (a checkout, or an editable installation), then where pip puts data.
    """
    beside = Path(deadpool_megatron.__file__).parents[1]
    prefixes = [
        beside,
        Path(sys.prefix),
        Path(sysconfig.get_path("data")),
        Path(site.getuserbase()),
    ]
    return list(dict.fromkeys([beside, *(p / "share" / "deadpool_megatron" for p in prefixes)]))


def find_shipped(name: str) -> Path | None:
    """Return the first file of that name, like ``configs/tiny.args``; None if there is none."""
    return next((root / name for root in shipped_roots() if (root / name).is_file()), None)


def _files() -> dict[str, Path]:
    files: dict[str, Path] = {}
    for folder, known in _FOLDERS.items():
        found = find_shipped(known)
        if found is None:
            looked = ", ".join(map(str, shipped_roots()))
            raise CommandError(
                f"{known} is missing: install the package again (looked in {looked})"
            )
        root = found.parents[len(Path(known).parts) - 1]
        for source in sorted((root / folder).rglob("*")):
            if source.is_file():
                files[str(source.relative_to(root))] = source
    return files
