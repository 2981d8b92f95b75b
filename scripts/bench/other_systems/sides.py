"""The sides of the case ``peers``: how each is started, struck and read."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.frame import BenchError
from common.outcomes import StepReport, cause_in, parse_reports
from common.struck import NODES, UNMEASURED, iterations, run_struck, strike, training_arguments
from common.trainings import Measured, run_plain, struck_at, watch

from deadpool_megatron.failpoints import ENVIRONMENT_NAME as FAULTS_VARIABLE
from other_systems.environments import python_of

_BENCH = Path(__file__).parents[1]
# Longer than the longest limit of a peer, the 120 s of the in-process restart's barrier.
_SILENCE_SECONDS = 180.0
_LAUNCHERS = {
    "torchrun": "torch.distributed.run",
    "ft_launcher": "nvidia_resiliency_ext.fault_tolerance.launcher",
}


@dataclass(frozen=True)
class Side:
    """One way to survive: see sides.toml. ``node``: its whole node is killed, not a process."""

    description: str
    start: str
    keeper: str
    every: int = 1
    peer: str = ""
    node: bool = False
    changed: str = ""


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SIDES: dict[str, Side] = {label: Side(**values) for label, values in _TABLE.items()}
_OF_A_NODE = (
    *("torchrun-sync-1", "torchrun-sync-10", "nvrx-injob-10", "nvrx-inprocess-10"),
    *("nvrx-local-1", "lm-resiliency-1", "deadpool-process"),
)
SIDES |= {
    f"{label.removesuffix('-process')}-node": replace(SIDES[label], node=True)
    for label in _OF_A_NODE
}

#: sides of a run without a fault, by name and steps between two saves; the last saves nothing
OTHERS = {
    f"{label}-{every}": replace(SIDES[f"{label}-1"], every=every)
    for label in ("torchrun-sync", "torchrun-async", "lm-resiliency")
    for every in (1, 2, 5, 10, 50)
} | {"torchrun": replace(SIDES["torchrun-sync-1"], keeper="none")}

#: other systems in use that the bench cannot run, with the reason
NOT_RUN = {
    "torchft": "torchft 0.2: its replica groups hold the whole optimizer state each and go on with"
    " fewer; the optimizer of this training is sharded over the data-parallel peers"
}


def run_undisturbed(name: str, steps: int, base: Path) -> Measured:
    """Run the training on stock gloo without a fault and without protection."""
    facts = base / f"{uuid.uuid4().hex}.json"
    training = [*training_arguments(name, iterations(steps)), "--out", str(facts)]
    measured = run_plain(training, NODES, steps, base, UNMEASURED)
    found = json.loads(facts.read_text())
    # It prints no times, and those of an undisturbed run are not used.
    measured.reports = [StepReport(s["iteration"], s["loss"], 0.0) for s in found["steps"]]
    measured.hashes = found["hashes"]
    return measured


def run_side(side: Side, name: str, steps: int, base: Path) -> Measured:
    """Run once with a fault. Raises BenchError unless it ends as it should."""
    victim = "node" if side.node else "self"
    if side.start == "deadpool":
        return run_struck(name, ["--deadpool-protection", "buddy"], steps, base, victim)
    training = training_arguments(name, iterations(steps))
    return run_other(side, training, NODES, steps, base, strike(steps, victim))


def run_other(
    side: Side,
    training: Sequence[str],
    ranks: int,
    steps: int,
    base: Path,
    fault: Mapping[str, object] | None = None,
) -> Measured:
    """Run a training once under another system. Raises as run_side."""
    python = str(python_of(side.peer)) if side.peer else sys.executable
    directory = base / uuid.uuid4().hex
    directory.mkdir()
    arguments = [
        *("--keeper", side.keeper, "--every", str(side.every), "--folder", str(directory / "kept")),
        *training,
    ]
    command = [*_start(side, python, directory, ranks), *arguments]
    try:
        return run_launched(command, fault, steps, directory)
    finally:
        shutil.rmtree(Path("/dev/shm", directory.name), ignore_errors=True)  # see nvrx_local.py


def run_launched(
    command: Sequence[str], fault: Mapping[str, object] | None, steps: int, directory: Path
) -> Measured:
    """Run ``command``, which ends in arguments of rank.py, perhaps with a fault. Raises as
    run_side."""
    reports, facts, plan = (directory / part for part in ("reports", "facts.json", "faults.json"))
    reports.touch()
    plan.write_text(json.dumps([fault] if fault else []))
    command = [*command, "--reports", str(reports), "--facts", str(facts)]
    variables = {
        FAULTS_VARIABLE: str(plan),
        # The path of the modules that it starts.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_BENCH), os.environ.get("PYTHONPATH")))),
        # Without it the second start of the workers finds the keys of the first, and gloo fails.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    log = directory / "log"
    with open(reports) as lines:
        try:
            new_steps, more = (lambda: sum(1 for _ in lines)), UNMEASURED if fault else 0
            measured = watch(command, log, steps, new_steps, variables, more, _SILENCE_SECONDS)
        except BenchError as error:
            # The end of a launcher's output names the failed rank, but seldom the reason.
            cause = cause_in(log.read_text(errors="replace"))
            raise BenchError(f"{str(error).splitlines()[0]} {cause}") from error
    measured.killed_at = struck_at(plan) if fault else None
    with open(reports) as lines:
        measured.reports = parse_reports(lines)
    measured.hashes = json.loads(facts.read_text())["hashes"]
    return measured


def _start(side: Side, python: str, directory: Path, ranks: int) -> Sequence[str]:
    if side.start == "inprocess":
        return [python, "-m", "other_systems.inprocess", str(ranks)]
    launcher = _LAUNCHERS[side.start]
    if side.node:
        store = {"torchrun": "apart", "ft_launcher": "first"}[side.start]
        start = ["other_systems.nodes", str(ranks), store, launcher, "--nproc-per-node", "1"]
    else:
        start = [launcher, "--standalone", "--nproc-per-node", str(ranks)]
    return [
        *(python, "-m", *start, "--max-restarts", "1"),
        # For folders that it does not remove.
        *("--log-dir", str(directory / "torchrun")),
        *("-m", "other_systems.rank"),
    ]
