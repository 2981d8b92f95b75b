"""Where a new run goes on from an earlier one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.run_directory import RunDirectory, read_json


def resume_point(old: RunDirectory, args: argparse.Namespace) -> Mapping[str, Any]:
    """Where an earlier run can be continued from. Raises CommandError when it cannot."""
    info = old.read_run()
    world_size = args.nodes * args.nproc_per_node
    try:
        restore = read_json(old.latest)
    except FileNotFoundError as error:
        raise CommandError(f"--resume {old.path}: that run has no durable state") from error
    except ValueError as error:
        raise CommandError(f"--resume {old.path}: {old.latest} is damaged") from error
    if info.world_size != world_size:
        raise CommandError(
            f"--resume {old.path}: that run has {info.world_size} roles, this one {world_size}"
        )
    path = Path(str(restore.get("path", "")))
    if restore.get("kind") != "initial" and not path.is_dir():
        raise CommandError(f"--resume {old.path}: {path} is not there any more")
    return restore
