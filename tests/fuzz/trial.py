"""Trains a draw undisturbed and with faults, and compares all results of both."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.support.findings import allowances, judge
from tests.faults.harness.jobs import Outcome, Program, run_program
from tests.fuzz.cleanup import end_all, left_over
from tests.fuzz.comparison import differences
from tests.fuzz.draws import ROLES, Draw
from tests.megatron_lm.harness.runs import tree
from tests.reach.trial import Result

_REACH = Path(__file__).parents[1] / "reach"
_STOP_SECONDS, _REFILL = 120, 6
_CHAINED = 6  # the iteration of the checkpoint from which a chain continues
# The exit statuses of a run that was stopped and can continue: from a disk, from memory.
_STOPPED = (75, 130)


@dataclass(frozen=True)
class Found:
    """``why``: the differences, or the end of the output of a run that does not train;
    ``recoveries``: what each was from; ``unfired``: the faults that did not strike."""

    result: Result
    why: str = ""
    recoveries: tuple[str, ...] = ()
    unfired: tuple[str, ...] = ()


def command_of(drawn: Draw) -> list[str]:
    """Return the script and its arguments, with flags that have to be allowed by name."""
    own = _REACH / drawn.script
    script = own if own.exists() else tree() / drawn.script
    command = [str(script), *drawn.flags, "--deadpool"]
    return [*command, *" ".join(allowances(judge(command))).split()]


def trial(directory: Path, data: Path, drawn: Draw) -> Found:
    """Try a draw in a new directory, which stays where something differs."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    command = tuple(word.replace("{data}", str(data)) for word in command_of(drawn))
    program = Program(command, drawn.nodes, ROLES // drawn.nodes)
    settings = " ".join(drawn.settings)
    try:
        wanted = run_program(directory / "undisturbed", program, settings=settings)
        if wanted.status != program.status:
            return Found(Result.CANNOT_TRAIN, wanted.output[-1500:])
        runs = _struck(directory, program, drawn)
        loaded = _CHAINED if drawn.choice["outside"] == "chain-load" else 0
        beside = "--async-save" in drawn.flags
        reasons = [*differences(wanted, runs, loaded, beside)]
        reasons += left_over(directory, runs[-1].status == 0)
    except AssertionError as error:
        return Found(Result.DIFFERENT, str(error)[-6000:])
    finally:
        end_all(directory)
    sources = [event.data["restore"] for run in runs for event in run.of_kind("epoch-decided")]
    fired = {name for run in runs for name in run.fired}
    unfired = sorted({str(fault["id"]) for fault in drawn.faults} - fired)
    if not reasons:
        shutil.rmtree(directory)
    result = Result.DIFFERENT if reasons else Result.IDENTICAL
    return Found(result, "\n".join(reasons), tuple(sources[1:]), tuple(unfired))


def _struck(directory: Path, program: Program, drawn: Draw) -> list[Outcome]:
    """Run with faults, and the runs that continue from it."""
    run, outside = directory / "struck", drawn.choice["outside"]
    chained = outside.startswith("chain")
    early = ("--exit-interval", str(_CHAINED)) if chained else ()
    begun = Program((*program.command, *early), *_size(program))
    acts = None if chained or outside == "none" else (drawn.moment, lambda: _act(run, drawn))
    # Numbers of another size are others: a trial waits for its spare.
    settings = " ".join([*drawn.settings, "--deadpool-elastic", "off"])
    options: dict[str, Any] = {"spares": drawn.spares, "refill": _REFILL, "settings": settings}
    runs = [run_program(run, begun, drawn.faults, when_stepping=acts, **options)]
    if runs[0].status not in _STOPPED:
        return runs
    left = [fault for fault in drawn.faults if fault["id"] not in runs[0].fired]
    more = ("--load", str(run / "saves")) if outside == "chain-load" else ()
    with_checkpoint = Program((*program.command, *more), *_size(program))
    if outside == "again":
        return [run_program(run, program, drawn.faults, **options)]
    resume = () if more else ("--resume", str(run))
    after = directory / "after"
    return [*runs, run_program(after, with_checkpoint, left, arguments=resume, **options)]


def _size(program: Program) -> tuple[int, int]:
    return program.nodes, program.members_per_node


def _act(run: Path, drawn: Draw) -> None:
    """Send the drawn request or signal."""
    match drawn.choice["outside"]:
        case "coordinator":
            os.kill(json.loads((run / "coordinator.json").read_text())["pid"], signal.SIGKILL)
        case "drain":
            nodes = sorted(int(path.stem) for path in (run / "nodes").glob("*.json"))
            _deadpool("drain", str(run), "--node", str(nodes[drawn.pick % drawn.nodes]))
        case "protect":
            _deadpool("protect", str(run), "--every", str(1 + drawn.pick))
        case "again":
            _deadpool("stop", str(run), "--wait", str(_STOP_SECONDS))
        case "dump":
            _deadpool("stop", str(run), "--dump", "--wait", str(_STOP_SECONDS))


def _deadpool(*arguments: str) -> None:
    """Send a request, whose effect shows in the run; a run that is over by then takes none."""
    command = [sys.executable, "-m", "deadpool_megatron", *arguments]
    environment = {k: v for k, v in os.environ.items() if k != failpoints.ENVIRONMENT_NAME}
    subprocess.run(
        command, env=environment, capture_output=True, timeout=2 * _STOP_SECONDS, check=False
    )
