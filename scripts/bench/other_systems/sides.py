"""The sides of the bench ``peers``: how each is started, struck and read."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from common.machine import marked_processes
from common.struck import NODES, UNMEASURED, iterations, run_protected, strike, training_arguments
from common.trainings import BenchError, Measured, run_plain, watch

from deadpool_megatron.failpoints import ENVIRONMENT_NAME as FAULTS_VARIABLE
from other_systems.environments import python_of
from other_systems.outcomes import OutcomeError, StepReport, cause_in, parse_reports

_BENCH = Path(__file__).parents[1]
# A variable of its own, which processes in other sessions inherit too.
_MARK = "DEADPOOL_BENCH_PEER"
# Longer than the longest limit of a peer, the 120 s of the in-process restart's barrier.
_SILENCE_SECONDS = 180.0
_ORPHAN_SECONDS = 10.0


@dataclass(frozen=True)
class Side:
    """One way to survive. ``start``: torchrun, ft_launcher, inprocess or deadpool; ``peer``: its
    package.

    ``keeper``: as for rank.py. ``node``: its whole node is killed, not the process alone.
    ``only_named``: the reason if it is measured only when it is named.
    """

    description: str
    start: str
    keeper: str
    every: int = 1
    peer: str = ""
    flags: tuple[str, ...] = ()
    node: bool = False
    only_named: str = ""


_DCP = "torchrun --max-restarts, torch.distributed.checkpoint"
_NVRX = "nvidia-resiliency-ext in-process restart with a warm spare, dcp.save each 10 steps"
_IN_PROCESS = f"{_NVRX}; an abort for gloo is added, its own covers NCCL only"
_IN_JOB = (
    "nvidia-resiliency-ext in-job restart (ft_launcher --max-restarts), dcp.save each 10 steps"
)
_LM = (
    "torchrun --max-restarts, lm-resiliency copies to a peer's memory each step; its own"
    " rendezvous, which agrees on one step for all ranks, cannot be loaded by this torch"
)
SIDES: dict[str, Side] = {
    "torchrun-sync-1": Side(f"{_DCP}.save each step", "torchrun", "dcp"),
    "torchrun-sync-10": Side(f"{_DCP}.save each 10 steps", "torchrun", "dcp", 10),
    "torchrun-async-1": Side(f"{_DCP}.async_save each step", "torchrun", "dcp-async"),
    "torchrun-async-10": Side(f"{_DCP}.async_save each 10 steps", "torchrun", "dcp-async", 10),
    "nvrx-injob-10": Side(_IN_JOB, "ft_launcher", "dcp", 10, peer="nvidia-resiliency-ext"),
    "nvrx-inprocess-10": Side(_IN_PROCESS, "inprocess", "dcp", 10, peer="nvidia-resiliency-ext"),
    "nvrx-inprocess-10-as-shipped": Side(
        f"{_NVRX}; as shipped",
        "inprocess",
        "dcp",
        10,
        peer="nvidia-resiliency-ext",
        flags=("--as-shipped",),
        only_named="its abort covers NCCL only: on gloo a rank stays in its collective, and no step"
        " ended within 180 s of the kill. Name it with --side to see that",
    ),
    "lm-resiliency-1": Side(_LM, "torchrun", "lm-resiliency", peer="lm-resiliency"),
    "deadpool-process": Side("deadpool, buddy", "deadpool", "none"),
}
_OF_A_NODE = (
    *("torchrun-sync-1", "torchrun-sync-10", "nvrx-injob-10", "nvrx-inprocess-10"),
    *("lm-resiliency-1", "deadpool-process"),
)
SIDES |= {
    f"{label.removesuffix('-process')}-node": replace(SIDES[label], node=True)
    for label in _OF_A_NODE
}

#: other systems in use that the bench cannot run, with the reason
NOT_RUN = {
    "torchft": "torchft 0.2: its replica groups hold the whole optimizer state each and go on with"
    " fewer; the optimizer of this training is sharded over the data-parallel peers"
}


@dataclass
class Run:
    """One run to its end: measurements before the kill, every reported step, final states.

    ``recomputed``: None where steps that are computed again are reported again.
    """

    measured: Measured
    reports: list[StepReport]
    hashes: list[str]
    killed_at: float | None = None
    recomputed: int | None = None


def run_undisturbed(name: str, steps: int, base: Path) -> Run:
    """Run the training on stock gloo without a fault and without protection."""
    facts = base / f"{uuid.uuid4().hex}.json"
    training = [*training_arguments(name, iterations(steps)), "--out", str(facts)]
    measured = run_plain(training, NODES, steps, base, UNMEASURED)
    found = json.loads(facts.read_text())
    # It prints no times, and those of an undisturbed run are not used.
    reports = [StepReport(s["iteration"], s["loss"], 0.0) for s in found["steps"]]
    return Run(measured, reports, found["hashes"])


def run_side(side: Side, name: str, steps: int, base: Path, environments: Path) -> Run:
    """Run once with a fault. Raises BenchError or OutcomeError unless it ends as it should."""
    if side.start == "deadpool":
        return _run_deadpool(side, name, steps, base)
    python = str(python_of(environments, side.peer)) if side.peer else sys.executable
    directory = base / uuid.uuid4().hex
    directory.mkdir()
    arguments = [
        *("--keeper", side.keeper, "--every", str(side.every), "--folder", str(directory / "kept")),
        *training_arguments(name, iterations(steps)),
    ]
    fault = strike(steps, "node" if side.node else "self")
    return run_launched([*_start(side, python, directory), *arguments], fault, steps, directory)


def run_launched(
    command: Sequence[str], fault: dict[str, object], steps: int, directory: Path
) -> Run:
    """Run ``command``, which ends in arguments of rank.py, with a fault. Raises as run_side."""
    reports, facts, plan = (directory / part for part in ("reports", "facts.json", "faults.json"))
    reports.touch()
    plan.write_text(json.dumps([fault]))
    command = [*command, "--reports", str(reports), "--facts", str(facts)]
    mark = uuid.uuid4().hex
    variables = {
        _MARK: mark,
        FAULTS_VARIABLE: str(plan),
        # The path of the modules that it starts.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_BENCH), os.environ.get("PYTHONPATH")))),
        # Without it the second start of the workers finds the keys of the first, and gloo fails.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    log = directory / "log"
    with open(reports) as lines:

        def new_steps() -> int:
            return sum(1 for _ in lines)

        try:
            measured = watch(
                command, log, steps, new_steps, variables, UNMEASURED, _SILENCE_SECONDS
            )
        except BenchError as error:
            # The end of a launcher's output names the failed rank, but seldom the reason.
            summary = str(error).partition(";")[0]
            raise BenchError(f"{summary}; {cause_in(log.read_text(errors='replace'))}") from error
        finally:
            end_orphans(mark)
    struck = Path(f"{plan}.fired") / "strike"
    if not struck.exists():
        raise OutcomeError(f"nothing was killed; {cause_in(log.read_text(errors='replace'))}")
    with open(reports) as lines:
        found = parse_reports(lines)
    hashes = json.loads(facts.read_text())["hashes"]
    return Run(measured, found, hashes, struck.stat().st_mtime)


def _start(side: Side, python: str, directory: Path) -> Sequence[str]:
    if side.start == "inprocess":
        return [python, "-m", "other_systems.inprocess", str(NODES), *side.flags]
    launchers = {
        "torchrun": "torch.distributed.run",
        "ft_launcher": "nvidia_resiliency_ext.fault_tolerance.launcher",
    }
    if side.node:
        store = {"torchrun": "apart", "ft_launcher": "first"}[side.start]
        single = ("--nproc-per-node", "1")
        start = ["other_systems.nodes", str(NODES), store, launchers[side.start], *single]
    else:
        start = [launchers[side.start], "--standalone", "--nproc-per-node", str(NODES)]
    return [
        *(python, "-m", *start, "--max-restarts", "1"),
        # For folders that it does not remove.
        *("--log-dir", str(directory / "torchrun")),
        *("-m", "other_systems.rank"),
    ]


def _run_deadpool(side: Side, name: str, steps: int, base: Path) -> Run:
    flags = ["--deadpool-protection", "buddy"]
    victim = "node" if side.node else "self"
    protected = run_protected(name, flags, steps, base, victim)
    result = protected.result
    assert result is not None
    struck = result.directory.with_suffix(".faults.json.fired") / "strike"
    return Run(
        protected.measured,
        [StepReport(s.iteration, s.loss or "", s.wall_seconds) for s in protected.steps],
        [result.roles[role].sha256 for role in sorted(result.roles)],
        struck.stat().st_mtime,
        result.recoveries[0].steps_recomputed,
    )


def end_orphans(mark: str) -> None:
    """Give the processes of a peer a moment to end, then kill them."""
    deadline = time.monotonic() + _ORPHAN_SECONDS
    while any(_living(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in _living(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _living(mark: str) -> Iterator[int]:
    return marked_processes(mark, _MARK)
