"""The cells of the fault matrix: where a fault strikes (phase) and whom (victim).

A chain runs several cells in sequence in one job: each strikes in an iteration of its own,
spares are refilled, and the state of all roles is compared after every iteration.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.faults.harness.jobs import Layout, fault

# Iterations between two faults of a chain: one to replay, one undisturbed.
SPACING = 2
FIRST_ITERATION = 3
# Evaluation and save are due after every iteration divisible by these.
EVALUATION_INTERVAL = 4
SAVE_INTERVAL = 6


@dataclass(frozen=True)
class Phase:
    """A point of the iteration. ``every`` bounds it to iterations that contain it."""

    name: str
    point: str
    match: tuple[tuple[str, Any], ...] = ()
    nth: int = 1
    every: int = 1


PHASES: tuple[Phase, ...] = (
    Phase("forward", "forward", (("microbatch", 1),)),
    Phase("pipeline-send", "comm", (("op", "send"), ("group", "PIPELINE_MODEL_PARALLEL_GROUP"))),
    Phase("pipeline-receive", "comm", (("op", "recv"), ("group", "PIPELINE_MODEL_PARALLEL_GROUP"))),
    Phase("backward", "backward", (("microbatch", 1),)),
    Phase(
        "reduce-scatter",
        "comm",
        (("op", "reduce_scatter_single_coalesced"), ("group", "DATA_PARALLEL_GROUP_WITH_CP")),
    ),
    Phase("grad-norm", "comm", (("op", "allreduce"), ("section", "optimizer"))),
    Phase("update", "optimizer.inside"),
    Phase("updated", "optimizer.updated"),
    Phase("all-gather", "comm", (("op", "all_gather_single_coalesced"), ("section", "optimizer"))),
    Phase("before-scheduler", "optimizer.after"),
    Phase("between-steps", "step.begin"),
    Phase("snapshot", "snapshot.copy"),
    Phase("evaluation", "evaluation.microbatch", (("microbatch", 1),), every=EVALUATION_INTERVAL),
    Phase("after-evaluation", "evaluation.end", every=EVALUATION_INTERVAL),
    Phase("save", "save.begin", every=SAVE_INTERVAL),
    Phase("saved", "save.written", every=SAVE_INTERVAL),
)
TENSOR_PHASE = Phase(
    "tensor-all-reduce",
    "comm",
    (("op", "allreduce"), ("group", "TENSOR_MODEL_PARALLEL_GROUP")),
    nth=5,
)


@dataclass(frozen=True)
class Cell:
    """A fault: in ``phase``, in the process of ``role``; ``target``: the processes that die."""

    phase: Phase
    role: int
    target: str

    @property
    def name(self) -> str:
        """Readable and unique."""
        return f"{self.phase.name}-{self.target}-of-role{self.role}"


def cells(layout: Layout, phases: Sequence[Phase]) -> list[Cell]:
    """Phases x victims: node of role 0, of a middle role, of the last role; one bare process."""
    middle = layout.roles // 2 - (layout.roles > 4)
    victims = [(0, "node"), (middle, "node"), (layout.roles - 1, "node"), (middle, "self")]
    return [Cell(phase, role, target) for phase in phases for role, target in victims]


def pairwise(layout: Layout, phases: Sequence[Phase], shift: int = 0) -> list[Cell]:
    """Every phase once and every victim evenly: a covering array of the full product.

    Arrays with the shifts 0 to 3 are the full product, cut into four.
    """
    full = cells(layout, phases)
    width = len(full) // len(phases)
    return [full[row * width + (row + shift) % width] for row in range(len(phases))]


def chains(
    chosen: Sequence[Cell], length: int
) -> Iterator[tuple[list[Cell], list[dict[str, Any]]]]:
    """Cut cells into chains and give each fault its iteration."""
    for start in range(0, len(chosen), length):
        part = list(chosen[start : start + length])
        iteration = FIRST_ITERATION
        plan = []
        for cell in part:
            while iteration % cell.phase.every:
                iteration += 1
            plan.append(
                {
                    **fault(cell.name, cell.phase.point, target=cell.target, nth=cell.phase.nth),
                    "match": {**dict(cell.phase.match), "role": cell.role, "iteration": iteration},
                }
            )
            iteration += SPACING
        yield part, plan


def last_iteration(plan: Sequence[dict[str, Any]]) -> int:
    """How long a chain has to train."""
    return max(int(entry["match"]["iteration"]) for entry in plan) + SPACING
