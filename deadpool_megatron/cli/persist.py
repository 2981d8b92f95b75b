"""``deadpool persist``: have a live run write a standard checkpoint beside its training."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, add_run_directory, ask, raw
from deadpool_megatron.cluster.run_directory.directory import RunDirectory

_LOOK_SECONDS = 0.5
_EXAMPLES = """\
examples:
  deadpool persist RUN                        into --deadpool-persist-directory, or RUN/exports
  deadpool persist RUN /shared/before-update --wait 600
"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = raw(
        subparsers.add_parser(
            "persist",
            help="write a standard checkpoint in the background",
            description="Write one of the next iterations as a torch_dist checkpoint that Megatron"
            " loads with --load. Training is not held; --deadpool-persist-keep does not remove it.",
            epilog=_EXAMPLES,
        )
    )
    add_run_directory(parser)
    parser.add_argument(
        "directory", type=Path, nargs="?", metavar="TO", help="a directory that all nodes share"
    )
    parser.add_argument(
        "--wait", type=float, metavar="SECONDS", help="until it is written; fails if it is not"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    directory = RunDirectory(args.run_dir)
    wanted = "" if args.directory is None else str(args.directory.absolute())
    answer = ask(directory, {"command": "persist", "directory": wanted})
    if args.wait is None:
        print(f"a checkpoint will be written to {answer['directory']}: see 'deadpool status'")
        return 0
    limit = time.monotonic() + args.wait
    while (export := ask(directory, {"command": "status"})["status"]["export"])["asked"]:
        if time.monotonic() > limit:
            now = export["now"]
            stage = f"{now['step']} iteration {now['iteration']}" if now else "not begun yet"
            raise CommandError(f"no checkpoint within {args.wait:g} s ({stage}); it goes on")
        time.sleep(_LOOK_SECONDS)
    last = export["last"]
    if last["error"]:
        raise CommandError(f"no checkpoint of iteration {last['iteration']}: {last['error']}")
    print(f"iteration {last['iteration']} is in {last['path']}")
    return 0
