"""Parts seam, rebuild and losses: trainings that lose processes at moments difficult for NCCL.

As a program (``-m proof.losses ARGUMENTS``) it is the trainer with two more fault points in a step:
at ``assert`` a kernel asserts, which ruins the context of its process; ``pause`` takes a while.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from proof.result import Task
from proof.trainings import Job, embedded_program, fault, take

#: values of --deadpool-set rebuild, the riskiest for a device last
_WAYS = ("one-by-one", "split", "side-by-side")
#: a node that is stopped for longer than a silent node may be wakes in an epoch that is over
_STOPPED_SECONDS, _PAUSE_SECONDS = 9.0, 6.0


def first_kills(task: Task) -> None:
    """Run part seam: communicators made sequentially."""
    _kill_over_and_over(task, _WAYS[0])


def rebuilds(task: Task) -> None:
    """Run part rebuild: communicators made in the other ways."""
    for way in _WAYS[1:]:
        _kill_over_and_over(task, way)


def _kill_over_and_over(task: Task, way: str) -> None:
    """Kill the process of role 1 over and over; that of role 0 stays, with its device."""
    job = Job(task.device, task.device.communicator, 2, embedded_program(task))
    kills = [fault(1, 3 + 2 * number, "self") for number in range(task.size.kills)]
    take(task, way, job, kills, settings=("--deadpool-set", f"rebuild={way}"))
    survivor = [loss for loss in task.facts[way]["lost processes"] if loss["role"] == 0]
    task.expect(not survivor, f"{way}: the survivor was replaced: {survivor}")


def special(task: Task) -> None:
    """Run part losses: role 1 is lost in a batch of sends and receives, by an assert of its device,
    in a rebuild, and as its node is stopped; then role 0, when that node has woken."""
    program = [*embedded_program(task, "proof.losses"), "--pipeline-model-parallel-size", "2"]
    more = {"match": {"role": 1, "op": "send", "iteration": 3}}
    again = {"match": {"role": 1}, "after": (killed := fault(1, 5, "self"))["id"]}
    wakes = {"signal": "STOP", "resume_after_seconds": _STOPPED_SECONDS}
    faults = [
        fault(1, 3, "self", "comm", **more),
        fault(1, 4, "self", "assert", action="mark"),
        killed,
        fault(1, 5, "self", "recovery.rebuild", **again),
        fault(1, 6, "node", **wakes),
        fault(1, 7, "self", "pause", action="mark"),
        fault(0, 8, "self"),
    ]
    job = Job(task.device, task.device.communicator, 2, program)
    # A spare more, for a device that cannot be used again.
    take(task, "losses", job, faults, losses=5, spares=2)


def main(arguments: list[str]) -> int:
    """Train."""
    import torch

    from deadpool_megatron import failpoints
    from deadpool_megatron.trainer import __main__ as trainer
    from deadpool_megatron.trainer.gpt_loop import TrainingLoop

    own = TrainingLoop.train_step

    def step(loop: Any) -> None:
        at = {"iteration": loop.counters["iteration"] + 1}
        if failpoints.hit("assert", **at):
            where = next(loop.models[0].parameters()).device
            # An index out of bounds is an assert of a kernel.
            torch.zeros(4, device=where)[torch.tensor([9], device=where)].sum().item()
        if failpoints.hit("pause", **at):
            time.sleep(_PAUSE_SECONDS)
        own(loop)

    TrainingLoop.train_step = step  # type: ignore[method-assign]
    return trainer.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
