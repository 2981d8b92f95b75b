"""How long does training stand still after a failure, and in which phase?

Four nodes and a spare train four replicas, each of a quarter of the roles as pipeline stages. With
--sleep a step also sleeps, which stands for the work of a device, so that many roles can be tried
on few cores. The kinds of failure take turns:

  node, process     role 1's is killed in a backward pass; the spare takes over, or the process is
                    started again in place
  exception         the process of role 1 raises in a backward pass, and ends
  any moment        the processes of a node with roles are killed by pid at a random moment
  coordinator       the same, of the training node that coordinates (the coordinator of the spare
                    was killed before, so that a node with roles had to take over)
  coordinator+node  the coordinator and a node without it die at the same random moment
  fewer replicas    as node, without a spare: three replicas continue from memory at once
  torchrun          the same under torchrun, which restarts all processes with --nnodes 3:4, from a
                    torch_dist checkpoint (DCP) of each step; its wait for a fourth node is set from
                    30 to 1 s. It has no threads of ours, only cpu_seconds_per_step of all

The last two run only if they are named (--kind).

kill_to_new_step_seconds is from the kill to the end of the first step after the newest that was
finished before; then the seconds of each phase of the recovery. own_cpu_seconds_per_step is of the
steps before the failure. Each run is compared with an undisturbed run, bit by bit; a difference
makes the exit status 1. No value is left out.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import uuid
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from common import slow_steps
from common.frame import Facts, UsageError, at_least, in_turns
from common.outcomes import seconds_of
from common.struck import NODES, UNMEASURED, iterations, size_flags, strike, struck_iteration
from common.trainings import Measured, is_identical, row_of, run_protected
from other_systems.sides import run_launched

from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.journal.terms import newest_term
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json

MINUTES = 60
ROUNDS, STEPS = 4, 32
QUICK = ("--rounds", "1", "--steps", "2", "--roles", "4", "--sleep", "0", "--kind", "node")
PLANNED = {
    "node": {"target": "node"},
    "process": {"target": "self"},
    "exception": {"target": "self", "action": "raise"},
    "fewer replicas": {"target": "node"},
}
USUAL = ("node", "process", "exception", "any moment", "coordinator", "coordinator+node")
ELASTIC = ("--spares", "0", "--deadpool-elastic", "on", "--deadpool-elastic-wait", "0")
FEWER = ("fewer replicas", "torchrun")
SLOW_STEPS = str(Path(slow_steps.__file__))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this case."""
    roles = {"type": int, "nargs": "*", "metavar": "N"}
    parser.add_argument("--roles", default=[8], help="multiples of 4 (default: 8)", **roles)
    parser.add_argument("--kind", choices=(*USUAL, *FEWER), nargs="*", default=USUAL)
    seconds = at_least(0, float)
    parser.add_argument("--sleep", type=seconds, default=0.5, metavar="S", help="in each step")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of random moments")


def measure(args: argparse.Namespace, base: Path) -> Facts:
    """Run all kinds in turns, for each number of roles."""
    if any(roles < NODES or roles % NODES for roles in args.roles):
        raise UsageError(f"--roles: multiples of {NODES}")
    facts: Facts = {"at": "roles", "sleep_seconds": args.sleep, "rows": [], "wrong": []}
    for roles in args.roles:
        train = partial(run_replicas, roles, args.steps, base, sleep=args.sleep)
        undisturbed = train()
        dice = random.Random(args.seed)
        sides = {kind: partial(struck, train, kind, dice, args.steps) for kind in args.kind}
        if "torchrun" in sides:
            sides["torchrun"] = partial(torchrun, roles, args.steps, base)
        for kind, runs in in_turns(f"{roles} roles", args.rounds, sides).items():
            facts["rows"].append(row_of(kind, runs, at=roles, **costs_of(runs)))
            # Fewer replicas add up in another order.
            if kind not in FEWER and not all(is_identical(undisturbed, run) for run in runs):
                facts["wrong"].append(f"{roles} roles, {kind}: not bit-identical")
    return facts


def run_replicas(
    roles: int,
    steps: int,
    base: Path,
    flags: Sequence[str] = ("--spares", "1"),
    *,
    sleep: float,
    **more: object,
) -> Measured:
    """Train four replicas on four nodes under ``deadpool run``."""
    return run_protected(
        *(training(roles, steps), steps, base, NODES, roles // NODES, flags),
        program=(SLOW_STEPS, "protected"),
        variables={slow_steps.VARIABLE: str(sleep)},
        unmeasured_steps=UNMEASURED,
        **more,  # type: ignore[arg-type]
    )


def training(roles: int, steps: int) -> list[str]:
    """Return the flags of the trainer: a small model with a layer or two for each stage."""
    return [
        *(*size_flags(64, max(4, roles // NODES)), "--seq-length", "64"),
        *("--pipeline-model-parallel-size", str(roles // NODES)),
        *("--global-batch-size", "24", "--micro-batch-size", "2"),
        *("--train-iters", str(iterations(steps))),
    ]


def struck(
    train: partial[Measured], kind: str, dice: random.Random, steps: int, _: int
) -> Measured:
    """Run with a failure."""
    if kind in PLANNED:
        flags = {"flags": ELASTIC} if kind in FEWER else {}
        return train(faults=[strike(steps, **PLANNED[kind])], **flags)
    killer = Killer(kind, dice, steps)
    measured = train(look=killer.look)
    measured.killed_at = killer.killed_at
    costs_of([measured])  # a strike that came too late is an error now, not after all rounds
    return measured


def torchrun(roles: int, steps: int, base: Path, _: int) -> Measured:
    """Run under a torchrun of each node, which continues with fewer."""
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


class Killer:
    """Kills the processes of a node by pid, at a random moment of an iteration."""

    def __init__(self, kind: str, dice: random.Random, steps: int) -> None:
        self.killed_at: float | None = None
        self._kind, self._dice = kind, dice
        self._iteration = struck_iteration(steps)
        self._due = float("inf")
        self._reported_at = time.monotonic()
        self._moved_from: int | None = None

    def look(self, directory: Path, reported: Sequence[int]) -> None:
        """Strike if it is time; called often, with the iterations reported since the last call."""
        run, now = RunDirectory(directory), time.monotonic()
        if self.killed_at is not None:
            return
        if self._kind == "coordinator" and self._moved_from is None and reported:
            self._moved_from = coordinating_node(run)
            posix.kill(coordinator_pid(run))
        if self._iteration - 1 in reported:
            self._due = now + self._dice.uniform(0.0, now - self._reported_at)
        if reported:
            self._reported_at = now
        if now >= self._due and coordinating_node(run) != self._moved_from:
            victims = self._victims(run)
            self.killed_at = time.time()
            for pid in victims:
                posix.kill(int(pid))

    def _victims(self, run: RunDirectory) -> list[int]:
        where, pids = coordinating_node(run), [coordinator_pid(run)]
        listings = run.node_listings()
        others = [node for node in sorted(listings) if node < NODES and node != where]
        node = where if self._kind == "coordinator" else self._dice.choice(others)
        listing = listings[node]
        return [
            *(pids if "coordinator" in self._kind else []),
            *(listing["agent"], listing["vault"], *listing["members"].values()),
        ]


def coordinating_node(run: RunDirectory) -> int:
    """Return the node of the newest coordinator."""
    term = newest_term(Journal(run.journal))
    assert term is not None
    return term.node


def coordinator_pid(run: RunDirectory) -> int:
    """Return the process of the newest coordinator that has written its address."""
    return int(read_json(run.coordinator)["pid"])


def costs_of(runs: Sequence[Measured]) -> dict[str, list[float]]:
    """Return what each failure has cost: seconds to a new step, of each phase, and steps again."""
    found: dict[str, list[float]] = {"kill_to_new_step_seconds": [], "steps_recomputed": []}
    for run in runs:
        seconds, _, again = seconds_of(run.reports, run.killed_at or 0.0, run.mean_seconds)
        found["kill_to_new_step_seconds"].append(seconds)
        found["steps_recomputed"].append(again if run.recomputed is None else run.recomputed)
        recoveries = run.result.recoveries if run.result else []
        for name in dict.fromkeys(name for each in recoveries for name in each.phases):
            spent = sum(each.phases.get(name, 0.0) for each in recoveries)
            found.setdefault(f"{name}_seconds", []).append(spent)
    return found
