"""Trains a small GPT with tensor, pipeline and data parallelism (2 x 2 x 2) twice, on 4 nodes of 2
processes and 1 spare. In the second run the process of role 0 kills its whole node with SIGKILL
in the middle of a backward pass: no other process could do so at an exact moment. Both runs use
CPUs and gloo, even on a machine with GPUs.

With --elastic a run of three nodes, each with a model replica, has no spare: after the kill two of
them continue, and all three once another node has joined. From each change on it is compared with
stock training at that size, which loads a checkpoint of stock training at the size before.

Exit status: 0 bit-identical, 1 not, 2 something needed is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cli import plot
from deadpool_megatron.cli.common import CommandError, number, table
from deadpool_megatron.cli.compare import Comparison, compare_results, describe
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cli.examples import find_shipped
from deadpool_megatron.cli.run_result import ResultError, RoleResult, RunResult, read_result
from deadpool_megatron.cli.watch import Follower
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.failpoints import ENVIRONMENT_NAME as FAULTS_VARIABLE
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.observe.story import PHASES, Interruption, Story
from deadpool_megatron.preflight.host import GPU_VARIABLE, visible_gpus
from deadpool_megatron.process_names import interpreter

CONFIG = "configs/tiny.args"
_TRAINER = "deadpool_megatron.trainer"
_POLL_SECONDS = 0.05
# The configuration warms the learning rate up for five iterations; some must follow.
_MIN_ITERATIONS = 8


class DemoError(Exception):
    """The demo cannot run, or a run of it failed. ``status``: the exit status of the demo."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class DemoRun:
    """A finished run of the demo. ``seconds``: its duration; ``killed_at``: wall clock of the kill,
    None for a run without a kill."""

    directory: Path
    command: list[str]
    seconds: float
    result: RunResult
    killed_at: float | None = None


@dataclass(frozen=True)
class DemoSize:
    """The size and the devices of the runs. ``environment``: variables for their processes;
    ``options``: further options of ``deadpool run``; ``flags``: further flags of the trainer."""

    nproc_per_node: int
    tensor: int
    communicator: str
    environment: Mapping[str, str]
    nodes: int = 4
    spares: int = 1
    pipeline: int = 2
    options: str = ""
    flags: str = ""


#: No GPU is visible, as the runs might get different numbers from GPUs.
ON_CPUS = DemoSize(2, 2, "gloo", {GPU_VARIABLE: ""})
#: Each process needs a GPU of its own, also on the spare node.
ON_GPUS = DemoSize(1, 1, "nccl", {})
_OPTIONS = "--refill 1 --deadpool-elastic on --deadpool-elastic-wait 0.1"
_OPTIONS += " --deadpool-set settle-seconds=2 --deadpool-set hash-interval=1"
#: The batch divides by 3 and 2; the learning rates do not depend on the number of iterations.
_FLAGS = "--global-batch-size 12 --lr-decay-style constant"
ELASTIC = DemoSize(1, 1, "gloo", ON_CPUS.environment, 3, 0, 1, _OPTIONS, _FLAGS)


def launch_command(run_directory: Path, iterations: int, size: DemoSize = ON_CPUS) -> list[str]:
    """Return the command that a user would type, with this interpreter."""
    return [
        *interpreter("-m", "deadpool_megatron", "run"),
        *("--nodes", str(size.nodes), "--spares", str(size.spares)),
        *("--nproc-per-node", str(size.nproc_per_node), "--run-dir", str(run_directory)),
        *("--quiet", "--deadpool-communicator", size.communicator, *size.options.split(), "--"),
        *("-m", _TRAINER, f"@{find_shipped(CONFIG)}"),
        *("--tensor-model-parallel-size", str(size.tensor)),
        *("--pipeline-model-parallel-size", str(size.pipeline)),
        *("--use-distributed-optimizer", "--train-iters", str(iterations), *size.flags.split()),
    ]


def kill_fault(iteration: int, target: str = "node") -> dict[str, Any]:
    """Return the fault that kills the process of role 0 (target ``self``) or its whole node
    (``node``) in the backward pass of an iteration."""
    return {
        "id": f"kill-{target}-of-role-0",
        "point": "backward",
        "match": {"role": 0, "iteration": iteration},
        "action": "signal",
        "target": target,
        "signal": "KILL",
    }


def train(
    command: list[str], environment: Mapping[str, str], directory: Path, display: Display
) -> int:
    """Execute ``deadpool run`` and show its events; return its exit status. ``directory``: its run
    directory. If the demo is interrupted, end the run and pass the exception on.
    """
    follower = Follower(RunDirectory(directory), display)
    # In its own session: Ctrl-C in the terminal reaches only the demo.
    child = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while child.poll() is None:
            follower.poll()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_SECONDS)
    finally:
        child.terminate()
        child.wait()
        follower.close()
    return child.returncode


def run_once(
    display: Display,
    base: Path,
    name: str,
    iterations: int,
    fault: dict[str, Any] | None = None,
    size: DemoSize = ON_CPUS,
) -> DemoRun:
    """Train to the end in the run directory ``base/name``, with ``fault`` if it is not None. Raises
    DemoError."""
    directory = base / name
    environment = {**os.environ, **size.environment}
    environment.pop(FAULTS_VARIABLE, None)
    fired = None
    if fault is not None:
        plan = base / f"{name}-faults.json"
        plan.write_text(json.dumps([fault], indent=1))
        environment[FAULTS_VARIABLE] = str(plan)
        fired = base / f"{plan.name}.fired" / fault["id"]
    command = launch_command(directory, iterations, size)
    began = time.monotonic()
    if status := train(command, environment, directory, display):
        bad = ExitStatus.BAD_INPUT
        raise DemoError(f"the {name} run has exit status {status}", bad if status == bad else 1)
    try:
        result = read_result(directory)
    except ResultError as error:
        raise DemoError(f"{name} run: {error}", 1) from error
    seconds = time.monotonic() - began
    killed_at = fired.stat().st_mtime if fired is not None and fired.exists() else None
    return DemoRun(directory, command, seconds, result, killed_at)


@dataclass(frozen=True)
class Outcome:
    """The findings of the demo. ``kill_to_next_step``: seconds from the kill to the end of the
    interrupted step, by the clock of this host. ``event``: the begin of the closing sentence."""

    undisturbed: DemoRun
    failed: DemoRun
    comparison: Comparison
    recovery: Interruption
    kill_iteration: int
    kill_to_next_step: float | None
    event: str = "The run lost a node"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {
            **self.comparison.to_dict(),
            "iterations": self.undisturbed.result.iterations,
            "event": self.event,
            "killed_in_iteration": self.kill_iteration,
            "cause": self.recovery.cause,
            "phases": dict(self.recovery.phases),
            "recovery_seconds": self.recovery.seconds,
            "kill_to_next_step_seconds": self.kill_to_next_step,
            "steps_recomputed": self.recovery.steps_recomputed,
            "exposed_seconds": self.recovery.exposed_seconds,
            "runs": {
                name: {
                    "seconds": demo_run.seconds,
                    # without the interpreter's path on this machine
                    "command": [Path(demo_run.command[0]).name, *demo_run.command[1:]],
                }
                for name, demo_run in (("undisturbed", self.undisturbed), ("struck", self.failed))
            },
        }


def compare_runs(undisturbed: DemoRun, failed: DemoRun, kill_iteration: int) -> Outcome:
    """Compare the runs. Raises DemoError if the kill or the recovery did not happen, or a run has
    nothing to compare."""
    if failed.killed_at is None:
        raise DemoError("the node was not killed: the planned fault was never injected", 1)
    if not failed.result.recoveries:
        raise DemoError("the run reports no recovery, although a node was killed", 1)
    try:
        comparison = compare_results(undisturbed.result, failed.result)
    except ResultError as error:
        raise DemoError(str(error), 1) from error
    ends = [step.wall_seconds for step in failed.result.story.steps.after(kill_iteration - 1)]
    seconds = min(ends) - failed.killed_at if ends else None
    recovery = failed.result.recoveries[0]
    return Outcome(undisturbed, failed, comparison, recovery, kill_iteration, seconds)


def summary_lines(outcome: Outcome) -> list[str]:
    """Return the lines of the table and of the comparison; the last line is a sentence."""
    recovery = outcome.recovery
    begin = "pause" if recovery.planned else "kill"
    times = {
        **{f"{name}: {PHASES.get(name)}": value for name, value in recovery.phases.items()},
        f"from the {begin} to the next finished iteration": outcome.kill_to_next_step,
        "without all copies in memory": recovery.exposed_seconds,
    }
    rows = [[name, f"{value:.3f}"] for name, value in times.items() if value and value >= 0.0005]
    lines = ["", *table(["recovery", "seconds"], rows)]
    lines += ["", f"iterations recomputed: {recovery.steps_recomputed}"]
    if (more := len(outcome.failed.result.recoveries) - 1) > 0:
        lines.append(f"further recoveries in the same run: {more}")
    lines += describe(outcome.comparison)
    end = "and ended with other numbers: the differences are listed above"
    if outcome.comparison.identical:
        end = f"and its {outcome.comparison.compared['steps']} losses are the same bits"
    seconds = outcome.kill_to_next_step
    text = "" if seconds is None else f" for {seconds:.1f} s"
    return [*lines, "", f"{outcome.event}{text}, {end}."]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    text = f"on {ON_GPUS.nodes + ON_GPUS.spares} GPUs with NCCL, whose sums may come out in another"
    text += " order on the spare's GPU: different bits are then no fault"
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--gpu", action="store_true", help=text)
    text = "without a spare: continue with fewer model replicas, and later with all of them"
    kind.add_argument("--elastic", action="store_true", help=text)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the facts to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw losses and timeline")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep both runs, in DIR")
    count, text = number(int, _MIN_ITERATIONS), "iterations (default: 30, with --elastic 40)"
    parser.add_argument("--iterations", type=count, metavar="N", help=text)


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool demo``. Raises CommandError."""
    _check(args)
    base, display = _base_directory(args), Display()
    # SIGTERM ends the demo with its run, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcomes = (_elastic_run if args.elastic else _both_runs)(display, base, args)
        identical = all(outcome.comparison.identical for outcome in outcomes)
        _write_files(outcomes, args, identical=identical)
    except (DemoError, ResultError) as error:
        print(f"deadpool demo: {error}\nThe runs are kept in {base}", file=sys.stderr)
        return getattr(error, "status", 1)
    except KeyboardInterrupt:
        print(f"\ndeadpool demo: interrupted; the runs are kept in {base}", file=sys.stderr)
        return 130
    if args.run_dir is not None or not identical:
        report = f"deadpool report {outcomes[0].failed.directory}"
        display.line(f"The runs are kept in {base}; try: {report}")
    else:
        shutil.rmtree(base)
    for line in itertools.chain(*map(summary_lines, outcomes)):
        display.line(line)
    return 0 if identical else 1


def _both_runs(display: Display, base: Path, args: argparse.Namespace) -> list[Outcome]:
    """Run the undisturbed run and the run with a kill; return the outcome. Raises DemoError."""
    iterations, size = args.iterations or 30, ON_GPUS if args.gpu else ON_CPUS
    kill_iteration = iterations // 2 + 1
    processes = size.nodes * size.nproc_per_node
    display.line(
        f"A small GPT in {processes} processes on {size.nodes} nodes, and {size.spares} spare"
        f" node.\n\n1. Undisturbed, {iterations} iterations"
    )
    undisturbed = run_once(display, base, "undisturbed", iterations, size=size)
    text = "The same run, but the node of role 0 is killed in the backward pass of iteration"
    display.line(f"\n2. {text} {kill_iteration}")
    failed = run_once(display, base, "struck", iterations, kill_fault(kill_iteration), size)
    return [compare_runs(undisturbed, failed, kill_iteration)]


def _elastic_run(display: Display, base: Path, args: argparse.Namespace) -> list[Outcome]:
    """Train elastically, and with stock Megatron at the same sizes; return an outcome for each
    change of size. Raises DemoError."""
    iterations = args.iterations or 40
    kill = iterations // 4 + 1
    display.line(
        f"A small GPT on {ELASTIC.nodes} nodes, each with a model replica, and no spare.\n\n1. The"
        f" node of role 0 is killed in the backward pass of iteration {kill}, and another one joins"
    )
    run = run_once(display, base, "elastic", iterations, kill_fault(kill), ELASTIC)
    story, recoveries = run.result.story, run.result.recoveries
    sizes = {1: ELASTIC.nodes, **story.sizes}
    if [*sizes.values()] != [3, 2, 3] or len(recoveries) != 2:
        text = f"it trained with {[*sizes.values()]} nodes in turn, in {len(recoveries)} recoveries"
        raise DemoError(f"{text}: give more --iterations", 1)
    display.line("\n2. Stock training at the same sizes, each from the state at the change")
    outcomes, stock_story = list[Outcome](), Story()
    ends = [*(k - 1 for k in story.sizes), iterations]
    changes = zip(sizes.items(), ends, [None, *recoveries], strict=True)
    for (first, ranks), last, change in changes:
        display.status(f"{ranks} model replicas, iterations {first} to {last}", last / iterations)
        stock = _train_stock(base, ranks, first, last, stock_story)
        if change is not None:
            steps = [asdict(s) for s in story.steps.after(first - 1) if s.iteration <= last]
            states = (story.hashes or {}).get(last, {})
            part = _part(ranks, first, last, Story(), steps, states)
            event = f"The change to {ranks} model replicas stopped training"
            comparison = compare_results(stock.result, part)
            outcomes.append(Outcome(stock, run, comparison, change, first, change.seconds, event))
    display.close()
    return outcomes


def _part(ranks: int, first: int, last: int, story: Story, steps: Any, states: Any) -> RunResult:
    """Return the result of the iterations ``first`` to ``last`` of a training, whose steps are
    added to ``story``. ``states``: hashes by rank after the last iteration."""
    for step in steps:
        story.steps.add(step["iteration"], step, 0.0)
    roles = {rank: RoleResult(state, None, {}) for rank, state in states.items()}
    return RunResult(Path("part"), 0, "", ranks, last, roles, story, first - 1)


def _train_stock(base: Path, ranks: int, first: int, last: int, story: Story) -> DemoRun:
    """Train with stock Megatron up to the iteration ``last``, from the checkpoint of the previous
    call, if any. The steps are added to ``story``. Raises DemoError."""
    out, saves, began = base / "stock.json", base / "saves", time.monotonic()
    protected = launch_command(base, last, ELASTIC)
    command = [
        *interpreter("-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), "-m", f"{_TRAINER}.plain"),
        *protected[protected.index(_TRAINER) + 1 :],
        *("--out", str(out), "--save", str(saves)),
        *(("--load", str(saves)) if saves.exists() else ()),
    ]
    environment = {**os.environ, **ELASTIC.environment}
    with (base / "stock.log").open("ab") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            child.wait()
        finally:
            child.terminate()
            child.wait()
    if child.returncode:
        raise DemoError(f"stock training has exit status {child.returncode}: see {log.name}", 1)
    facts = json.loads(out.read_text())
    states = dict(enumerate(facts["hashes"]))
    result = _part(ranks, first, last, story, facts["steps"], states)
    return DemoRun(base, command, time.monotonic() - began, result)


def _check(args: argparse.Namespace) -> None:
    """Raise CommandError if the demo cannot run here with these arguments."""
    problem = ""
    if find_shipped(CONFIG) is None:
        problem = f"{CONFIG} is missing: install the package again"
    elif not all(map(importlib.util.find_spec, ("torch", "megatron"))):
        problem = (
            "it trains with torch and megatron-core, which are not installed here:"
            " pip install '.[megatron]' in the checkout"
        )
    elif args.plot is not None and importlib.util.find_spec("matplotlib") is None:
        problem = "--plot needs matplotlib: pip install matplotlib"
    elif args.plot is not None and args.plot.suffix not in (".png", ".pdf", ".svg"):
        problem = f"--plot {args.plot}: give the name of a file, as in FILE.png"
    elif args.gpu and len(visible_gpus(os.environ)) < (needed := ON_GPUS.nodes + ON_GPUS.spares):
        problem = f"--gpu needs {needed} visible GPUs: leave it out"
    for path in (args.json, args.plot):
        if path is not None and not path.absolute().parent.is_dir():
            problem = problem or f"the folder of {path} does not exist"
    if problem:
        raise CommandError(problem)


def _base_directory(args: argparse.Namespace) -> Path:
    if args.run_dir is None:
        return Path(tempfile.mkdtemp(prefix="deadpool-demo-"))
    base: Path = args.run_dir.absolute()
    if base.exists() and any(base.iterdir()):
        raise CommandError(f"{base} is not empty; choose another --run-dir")
    RunDirectory(base).make()
    return base


def _write_files(outcomes: Sequence[Outcome], args: argparse.Namespace, *, identical: bool) -> None:
    facts, last = [outcome.to_dict() for outcome in outcomes], outcomes[-1]
    values = {"bit_identical": identical, "changes": facts} if args.elastic else facts[0]
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(values, indent=1) + "\n")
        if args.plot is not None:
            stories = last.undisturbed.result.story, last.failed.result.story
            plot.draw(args.plot, *stories, identical=identical)
    except (OSError, CommandError) as error:
        raise DemoError(str(error), 2) from error
