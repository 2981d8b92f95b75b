"""Trains a cut-down configuration with one node lost in it, and undisturbed, in small processes."""

import os
import shutil
from enum import StrEnum
from pathlib import Path
from unittest import mock

from deadpool_megatron.support.findings import allowances, judge
from deadpool_megatron.support.flags import Level
from tests.faults.harness.jobs import Program, run_program
from tests.megatron_lm.harness.runs import dies, strike, tree
from tests.reach.shrink import COMMON, Shrunk


class Result(StrEnum):
    """The outcome for a configuration."""

    CUT_DOWN = "cut down"
    REFUSED = "refused"
    CANNOT_TRAIN = "does not train"
    IDENTICAL = "bit-identical"
    DIFFERENT = "different"


BAD = (Result.CANNOT_TRAIN, Result.DIFFERENT)
_HERE, _ROOT = Path(__file__).parent, Path(__file__).parents[2]
_FOLDERS = (_ROOT, _ROOT / "tests" / "megatron_lm" / "harness" / "emerging")


def command(shrunk: Shrunk) -> list[str]:
    """The script and its arguments, without what has to be allowed by name."""
    path = _HERE / shrunk.script if (_HERE / shrunk.script).exists() else tree() / shrunk.script
    return [str(path), *COMMON, *shrunk.flags.split(), "--deadpool"]


def refusal(shrunk: Shrunk) -> str:
    """The line about what of it is refused; empty: nothing."""
    refused = [each.line for each in judge(command(shrunk)) if each.level is Level.REFUSED]
    return "; ".join(refused)


def trial(directory: Path, shrunk: Shrunk) -> tuple[Result, str]:
    """Lose a node in the update of role 1, which has changed a part of the weights. Returns also
    the first difference, or what a run that failed has printed."""
    arguments = command(shrunk)
    owed = " ".join(allowances(judge(arguments))).split()
    cut = [f"--{kind}-model-parallel-size 2" in shrunk.flags for kind in ("tensor", "pipeline")]
    program = Program((*arguments, *owed), 4, 2 if all(cut) else 1)
    paths = (*map(str, (*_FOLDERS, tree())), os.environ.get("PYTHONPATH", ""))
    directory.mkdir(parents=True, exist_ok=True)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, paths))):
        wanted = run_program(directory / "undisturbed", program)
        if wanted.status != program.status:
            return Result.CANNOT_TRAIN, wanted.story()
        try:
            plan = [dies("loss", "optimizer.inside", 1, 5)]
            strike(directory / "struck", program, plan, wanted, spares=1, refill=0)
        except AssertionError as difference:
            return Result.DIFFERENT, str(difference)
    shutil.rmtree(directory)
    return Result.IDENTICAL, ""
