"""How much does a loss cost without a spare, when training continues with fewer model replicas?

Four nodes train four replicas, each of a quarter of the roles as pipeline stages; the same node is
killed in the same backward pass. The sides take turns: a spare takes the roles (``hot swap``);
without a spare three replicas continue from memory at once (``fewer replicas``); so they do under
torchrun, which restarts all processes with ``--nnodes 3:4``, from a torch_dist checkpoint (DCP) of
each step (``torchrun``; its wait for a fourth node is set from 30 to 1 s). Seconds are read as in
the case recovery; torchrun has no threads of ours, only cpu_seconds_per_step of all.
"""

from __future__ import annotations

import argparse
import sys
import uuid
from functools import partial
from pathlib import Path

from cases.recovery import costs_of, run_replicas, training
from common.frame import Facts, in_turns
from common.struck import NODES, strike
from common.trainings import Measured, row_of
from other_systems.sides import run_launched

MINUTES = 45
ROUNDS, STEPS = 3, 4
QUICK = ("--rounds", "1", "--steps", "2", "--roles", "4", "--side", "fewer replicas")
FLAGS = {
    "hot swap": ("--spares", "1"),
    "fewer replicas": (
        *("--spares", "0", "--deadpool-elastic", "on", "--deadpool-elastic-wait", "0"),
    ),
}
SIDES = (*FLAGS, "torchrun")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    parser.add_argument("--roles", type=int, choices=(4, 8, 16), nargs="*", default=[4, 8, 16])
    parser.add_argument("--side", choices=SIDES, nargs="*", default=list(SIDES))


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Run all sides in turns, for each number of roles."""
    facts: Facts = {"at": "roles", "rows": [], "roles_at_the_end": {}}
    for roles in args.roles:
        faults = [strike(args.steps, "node")]
        sides = {
            side: partial(_run_replicas, roles, args.steps, base, flags, faults)
            for side, flags in FLAGS.items()
        }
        sides["torchrun"] = partial(torchrun, roles, args.steps, base)
        chosen = {side: sides[side] for side in args.side}
        for side, runs in in_turns(f"{roles} roles", args.rounds, chosen).items():
            facts["rows"].append(row_of(side, runs, at=roles, **costs_of(runs)))
            ends = [len(run.result.roles) for run in runs if run.result]
            facts["roles_at_the_end"][f"{side}, {roles}"] = ends
    return facts


def _run_replicas(
    roles: int,
    steps: int,
    base: Path,
    flags: tuple[str, ...],
    faults: list[dict[str, object]],
    _: int,
) -> Measured:
    return run_replicas(roles, steps, base, flags, faults=faults)


def torchrun(roles: int, steps: int, base: Path, _: int) -> Measured:
    """Run under a torchrun of each node."""
    directory = base / uuid.uuid4().hex
    directory.mkdir()
    command = [
        *(sys.executable, "-m", "other_systems.nodes", f"{NODES - 1}:{NODES}", "apart"),
        *("torch.distributed.run", "--nproc-per-node", str(roles // NODES), "--max-restarts", "1"),
        *("--rdzv-conf", "last_call_timeout=1", "--log-dir", str(directory / "torchrun")),
        *("-m", "other_systems.rank", "--keeper", "torch-dist"),
        *("--folder", str(directory / "kept"), *training(roles, steps)),
    ]
    return run_launched(command, strike(steps, "node"), steps, directory)
