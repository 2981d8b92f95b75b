#!/usr/bin/env python
"""A change of size: a node of four is lost, and training continues with three model replicas.

    .venv/bin/python scripts/bench/size_change.py [--rounds N] [--roles N...] [--out FILE]

Four nodes train four replicas, each of a quarter of the roles as pipeline stages; the same node is
killed in the same backward pass. The sides take turns: a spare takes the roles (``hot swap``);
without a spare three replicas continue from memory at once (``fewer replicas``); so they do under
torchrun, which restarts all processes with ``--nnodes 3:4``, from a torch_dist checkpoint (DCP) of
each step (``torchrun``; its wait for a fourth node is set from 30 to 1 s). All values count.
"""

from __future__ import annotations

import sys
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from common.command import in_turns, parser_of, run_bench
from common.machine import ROOT
from common.struck import AFTER, NODES, UNMEASURED, iterations
from common.trainings import BenchError, run_protected
from other_systems.outcomes import OutcomeError, StepReport, outcome
from other_systems.sides import Run, run_launched

from deadpool_megatron.cli.run_result import read_result
from deadpool_megatron.observe.steps import summary

STEPS = 4
SPARE = ("--spares", "1")
ELASTIC = ("--spares", "0", "--deadpool-elastic", "on", "--deadpool-elastic-wait", "0")


def training(roles: int) -> list[str]:
    """Return the flags of the trainer."""
    return [
        *(f"@{ROOT / 'configs' / '20m.args'}", "--hidden-size", "256", "--num-layers", "4"),
        *("--num-attention-heads", "4", "--lr-warmup-iters", "1", "--log-interval", "1"),
        *("--pipeline-model-parallel-size", str(roles // NODES), "--use-distributed-optimizer"),
        *("--global-batch-size", "24", "--micro-batch-size", "2"),
        *("--train-iters", str(iterations(STEPS))),
    ]


def fault() -> dict[str, object]:
    """Return the kill of the node of role 1."""
    match = {"role": 1, "iteration": iterations(STEPS) - AFTER}
    return {"id": "strike", "point": "backward", "match": match, "target": "node"}


def deadpool(flags: tuple[str, ...], roles: int, base: Path, _: int) -> dict[str, Any]:
    """Run under ``deadpool run``; return what the failure cost."""
    nproc = roles // NODES
    measured = run_protected(
        training(roles),
        STEPS,
        base,
        NODES,
        nproc,
        flags,
        faults=[fault()],
        unmeasured_steps=UNMEASURED,
    )
    assert measured.directory is not None
    result = read_result(measured.directory)
    reports = [StepReport(s.iteration, s.loss or "", s.wall_seconds) for s in result.story.steps]
    struck = measured.directory.with_suffix(".faults.json.fired") / "strike"
    (recovery,) = result.recoveries
    run = Run(measured, reports, [], struck.stat().st_mtime, recovery.steps_recomputed)
    return {**cost_of(run), "roles_at_the_end": len(result.roles), "phases": dict(recovery.phases)}


def torchrun(roles: int, base: Path, _: int) -> dict[str, Any]:
    """Run under a torchrun of each node; return what the failure cost."""
    directory = base / uuid.uuid4().hex
    directory.mkdir()
    command = [
        *(sys.executable, "-m", "other_systems.nodes", f"{NODES - 1}:{NODES}", "apart"),
        *("torch.distributed.run", "--nproc-per-node", str(roles // NODES), "--max-restarts", "1"),
        *("--rdzv-conf", "last_call_timeout=1", "--log-dir", str(directory / "torchrun")),
        *("-m", "other_systems.rank", "--keeper", "torch-dist"),
        *("--folder", str(directory / "kept"), *training(roles)),
    ]
    return cost_of(run_launched(command, fault(), STEPS, directory))


def cost_of(run: Run) -> dict[str, Any]:
    """Return the cost of the kill, in seconds of the run's own steps before."""
    steps = run.measured.step_seconds
    assert run.killed_at is not None
    mean = sum(steps) / len(steps)
    found = outcome(run.reports, run.killed_at, mean, run.recomputed)
    return {**found.to_dict(), "step_seconds": steps}


def facts_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means of a side, and every single run."""
    seconds = [run["seconds_to_new_step"] for run in runs]
    phases = dict.fromkeys(name for run in runs for name in run.get("phases", {}))
    means = {name: summary([run["phases"].get(name, 0.0) for run in runs]) for name in phases}
    return {"kill_to_new_step_seconds": summary(seconds), "phases_seconds": means, "runs": runs}


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = parser_of(__doc__, 3, "turns of each side")
    parser.add_argument("--roles", type=int, choices=(4, 8, 16), nargs="*", default=[4, 8, 16])
    args = parser.parse_args()

    def of_roles(roles: int, base: Path) -> dict[str, Any]:
        sides = {
            "hot swap": partial(deadpool, SPARE, roles, base),
            "fewer replicas": partial(deadpool, ELASTIC, roles, base),
            "torchrun": partial(torchrun, roles, base),
        }
        found = in_turns(f"{roles} roles", args.rounds, sides)
        return {side: facts_of(runs) for side, runs in found.items()}

    def measured(base: Path) -> dict[str, Any]:
        try:
            return {"roles": {str(roles): of_roles(roles, base) for roles in args.roles}}
        except OutcomeError as error:
            raise BenchError(str(error)) from error

    def is_good(facts: dict[str, Any]) -> bool:
        """Whether three quarters of the roles were left where replicas should be."""
        return all(
            4 * run["roles_at_the_end"] == 3 * int(roles)
            for roles, sides in facts["roles"].items()
            for run in sides["fewer replicas"]["runs"]
        )

    return run_bench("size change", args.out, measured, is_good)


if __name__ == "__main__":
    sys.exit(main())
