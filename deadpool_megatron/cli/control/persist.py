"""``deadpool persist``: have a live run write a standard checkpoint beside its training."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import add_run_directory
from deadpool_megatron.cli.control.asking import add_wait, request
from deadpool_megatron.cluster.journal.requests import Request, Verb

_EXAMPLES = """\
examples:
  deadpool persist RUN                        into --deadpool-persist-directory, or RUN/exports
  deadpool persist RUN /shared/before-update --wait 600
"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "persist",
        help="write a standard checkpoint in the background",
        description="Write one of the next iterations as a torch_dist checkpoint that Megatron"
        " loads with --load. Training is not held; --deadpool-persist-keep does not remove it.",
        epilog=_EXAMPLES,
    )
    add_run_directory(parser)
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="TO", help="a directory that all nodes share"
    )
    add_wait(parser)


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    wanted = "" if args.directory is None else str(args.directory.absolute())

    def taken(known: Request) -> str:
        where = known.what["directory"]
        return f"a checkpoint will be written to {where}: see 'deadpool status'"

    return request(args, Verb.PERSIST, taken, directory=wanted)
