"""How large a run is: the flags for it, and ``run.json`` made from them."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cluster.run_directory.directory import RunInfo, segment_root
from deadpool_megatron.settings import Settings


def add_size(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """``--nodes``, ``--spares``, ``--nproc-per-node``."""
    parser.add_argument(
        "--nodes", type=int, required=required, metavar="N", help="nodes that train"
    )
    parser.add_argument(
        "--spares", type=int, default=0, metavar="S", help="nodes that wait, warm (default: 0)"
    )
    parser.add_argument(
        "--nproc-per-node",
        type=int,
        required=required,
        metavar="P",
        help="training processes on each node; there are N x P roles",
    )


def make_info(
    args: argparse.Namespace, settings: Settings, restore: Mapping[str, Any] | None = None
) -> RunInfo:
    """The facts of a new run, with a fresh run id."""
    run_id = secrets.token_hex(4)
    return RunInfo(
        run_id=run_id,
        world_size=args.nodes * args.nproc_per_node,
        nodes=args.nodes,
        spares=args.spares,
        nproc_per_node=args.nproc_per_node,
        command=tuple(args.command),
        settings=settings,
        segment_root=str(segment_root(run_id)),
        restore={} if restore is None else restore,
    )
