"""Judges a command line of Megatron-LM as the start of a run does. Each flag is supported, set by
deadpool, accepted by name (its source was read, it was never run), not reviewed, or refused. The
environment variables of this shell are judged as well. Nothing is started, and no GPU is needed.

examples:
  deadpool support -- pretrain_gpt.py --num-layers 32 --bf16 --tp-comm-overlap
  deadpool support --megatron Megatron-LM -- pretrain_gpt.py @my.args

exit status: 0 a run would start; 2 it would not, or bad input
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.failures import ExitStatus
from deadpool_megatron.support import judgement
from deadpool_megatron.support.flags import Level
from deadpool_megatron.support.judgement import Judged
from deadpool_megatron.support.versions import version_beside

_SECONDS = 300.0
_WORDS = {
    Level.SET: "set for you",
    Level.READ: "to be allowed",
    Level.UNREAD: "not reviewed",
    Level.REFUSED: "refused",
}


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "support",
        help="judge a command line of Megatron-LM",
        description=__doc__,
    )
    parser.add_argument(
        "--megatron",
        type=Path,
        metavar="DIR",
        help="take the defaults from the parser of this checkout (default: from the table)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Carry it out; returns the exit status."""
    if not args.command:
        raise CommandError("give -- and the script with its arguments")
    found = _judge(args.command, args.megatron)
    if args.json:
        print(json.dumps({"verdict": judgement.verdict(found), "rows": [_row(e) for e in found]}))
    else:
        _print(found)
    return ExitStatus.BAD_INPUT if judgement.refusal(found) else 0


def _judge(command: Sequence[str], tree: Path | None) -> list[Judged]:
    version = version_beside(tree)
    if tree is not None and not version:
        raise CommandError(f"{tree} is not a checkout of Megatron-LM")
    found = judgement.judge(command, None if tree is None else _parsed(command, tree), version)
    # What plays no part without NCCL is not judged.
    return found + ([] if "gloo" in command else judgement.judge_environment(os.environ))


def _parsed(command: Sequence[str], tree: Path) -> argparse.Namespace | None:
    """Return what the parser of ``tree`` makes of it; None where it takes it not, which is for
    Megatron-LM to say."""
    asked = [sys.executable, "-P", "-m", "deadpool_megatron.megatron_lm.parsing", str(tree)]
    line = json.dumps(list(command[1:])) + "\n"
    try:
        done = subprocess.run(asked, input=line, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"the parser of {tree} took over {_SECONDS:.0f} s") from error
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise CommandError(f"the parser of {tree} cannot be had: {said}; leave --megatron out")
    found = json.loads(done.stdout)
    return None if found is None else argparse.Namespace(**found)


def _row(each: Judged) -> dict[str, Any]:
    row = {"level": str(each.level), "shown": each.shown, "line": each.line}
    return {**row, "allowed": each.allowed, "fork": each.is_of_a_fork}


def _print(found: Sequence[Judged]) -> None:
    for each in found:
        allowed = " (allowed here)" if each.allowed else ""
        print(f"{_WORDS[each.level]}: {each.line}{allowed}")
    verdict, owed = judgement.verdict(found), judgement.allowances(found)
    if verdict == "allowed" and owed:
        verdict = f"needs {' '.join(owed)}"
    print(f"verdict: {verdict}")
