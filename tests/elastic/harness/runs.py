"""Runs that continue at another size when no spare is left, held against stock training at the same
sizes (legs)."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.ranks import SIZE_STEP, rank_of
from tests.elastic.harness.legs import Leg, Lengths, megatron_lm_legs, trainer_legs
from tests.faults.harness import jobs
from tests.megatron_lm.harness.runs import gpt, tree
from tests.persist.harness.checkpoints import contents, differences

ELASTIC = "--deadpool-elastic on --deadpool-elastic-wait 0.1 --deadpool-set settle-seconds=1"
HELD_TRAINER = str(Path(__file__).parents[2] / "persist" / "harness" / "held_trainer.py")
# Parameters begin at such elements of the buffer of a distributed optimizer.
_ALIGNMENT = 64
_NUMBERS = ("loss", "grad_norm", "learning_rate")


@dataclass(frozen=True)
class Job:
    """A program that can train at several sizes. ``replicas``: at full size; ``legs``: trains it
    without protection."""

    program: jobs.Program
    replicas: int
    legs: Callable[[Lengths, Path], Iterator[Leg]]

    @property
    def ranks_per_replica(self) -> int:
        """Return the number of ranks of a model replica."""
        return self.program.nodes * self.program.members_per_node // self.replicas


def trainer_job(
    flags: str, replicas: int, iterations: int, nodes: int, members: int = 1, every: int = 2
) -> Job:
    """The embedded trainer with a checkpoint after each ``every`` iterations; slow (see hold.py)
    until there is a file ``{run}.grown``."""
    layout = jobs.Layout("elastic", f"{flags} --global-batch-size 12", nodes, members)
    program = jobs.trainer(layout, iterations, f"--save {{run}}/saves --save-interval {every}")
    command = (HELD_TRAINER, f"6-{iterations}={{run}}.grown", *program.command[2:])
    arguments = f"{jobs.MODEL} {layout.flags} --train-iters {iterations}"
    legs = functools.partial(trainer_legs, arguments)
    return Job(replace(program, command=command), replicas, legs)


def megatron_lm_job(
    flags: Mapping[str, object],
    replicas: int,
    nodes: int,
    members: int = 1,
    every: int = 1,
    checkout: Path | None = None,
    within: Path | None = None,
) -> Job:
    """pretrain_gpt.py with a checkpoint after each ``every`` iterations. ``checkout``: another than
    that of all tests; ``within``: a tree made of it."""
    checkout = checkout or tree()
    flags = {"global_batch_size": 12, "bf16": True, "use_distributed_optimizer": True, **flags}
    program = gpt(
        nodes, within or checkout, **{**flags, "save": "{run}/saves", "save_interval": every}
    )
    legs = functools.partial(megatron_lm_legs, checkout, flags)
    return Job(replace(program, members_per_node=members), replicas, legs)


def run_elastic(
    directory: Path,
    job: Job,
    plan: Sequence[Mapping[str, Any]],
    *,
    grows: bool = False,
    settings: str = "",
    **options: Any,
) -> tuple[jobs.Outcome, list[int]]:
    """Run a job with faults and no spare, and hold it against stock; also return the numbers of
    model replicas with which it trained, in order. ``grows``: a lost node is replaced, and
    iterations take long until the run has its full size again."""
    if grows:
        options = {"refill": 1, "when_stepping": (1, lambda: await_growth(directory)), **options}
    else:
        directory.with_suffix(".grown").touch()
    settings = f"{ELASTIC} {settings}".strip()
    outcome = jobs.run_program(directory, job.program, plan, settings=settings, **options)
    missing = {str(fault["id"]) for fault in plan} - outcome.fired
    assert outcome.status == job.program.status, outcome.story()
    assert not missing, f"never fired: {sorted(missing)}\n{outcome.story()}"
    return outcome, hold(outcome, job)


def hold(outcome: jobs.Outcome, job: Job) -> list[int]:
    """Hold a run against stock; return the numbers of model replicas with which it trained."""
    decided, last = outcome.of_kind(Kind.EPOCH_DECIDED), outcome.final["iterations"]
    found = lengths(decided, last, job.replicas, job.ranks_per_replica)
    for (ranks, last), leg in zip(found, job.legs(found, outcome.directory.parent), strict=True):
        compare(outcome, job, leg, ranks, last)
    return [ranks // job.ranks_per_replica for ranks, _ in found]


def await_growth(directory: Path) -> None:
    """Wait until the run has its full size again, and have its iterations take no longer than they
    need."""
    epochs = set()

    def is_grown(event: Event) -> bool:
        if event.kind is Kind.EPOCH_DECIDED and event.epoch > 1:
            epochs.update([event.epoch] * (min(event.data["changes"], default=0) < SIZE_STEP))
        return event.kind is Kind.EPOCH_OPENED and event.epoch in epochs

    jobs.await_event(directory, is_grown)
    directory.with_suffix(".grown").touch()


def lengths(decided: Iterable[Event], last: int, replicas: int, per_replica: int) -> Lengths:
    """Return the numbers of ranks of a run in order, each with its last iteration. ``decided``:
    its decisions, in order; ``last``: its last iteration."""
    found, size = list[tuple[int, int]](), replicas
    for event in decided:
        ranks, restored = size * per_replica, int(event.data["generation"][1])
        while found and found[-1][1] > restored:  # computed again
            ranks, _ = found.pop()
        if restored > (found[-1][1] if found else 0):
            found.append((ranks, restored))
        if changes := event.data["changes"]:
            size = replicas - changes[0] // SIZE_STEP
    found.append((size * per_replica, last))
    return [list(legs)[-1] for _, legs in itertools.groupby(found, key=lambda leg: leg[0])]


def differing(
    leg: Leg, hashes: Mapping[str, Mapping[str, str]], first_role: int
) -> tuple[list[tuple[int, int]], int]:
    """Return (role, iteration) of each state of a run that is not that of the leg, and how many
    were compared. ``hashes``: of the run, by iteration and role."""
    found = {
        (role, iteration): states[iteration] == own
        for role, states in enumerate(leg.hashes, first_role)
        for iteration in states
        if (own := hashes.get(str(iteration), {}).get(str(role)))
    }
    return [key for key, is_equal in found.items() if not is_equal], len(found)


def compare(outcome: jobs.Outcome, job: Job, leg: Leg, ranks: int, last: int) -> None:
    """Hold the numbers of a leg, and the state after it, against those of stock."""
    where, steps = f"{ranks} ranks to {last}", outcome.final["steps"]
    own = {step["iteration"]: [step[name] for name in _NUMBERS] for step in steps}
    for step in leg.steps:
        wanted = [step[name] for name in _NUMBERS]
        assert own[step["iteration"]] == wanted, (where, step, outcome.story())
    first = (job.replicas - ranks // job.ranks_per_replica) * SIZE_STEP
    other, compared = differing(leg, outcome.final["hashes"], first)
    assert not other, (where, other)
    assert compared >= min(1, len(leg.hashes)) * ranks, where
    saved = outcome.directory / "saves" / f"iter_{last:07d}"
    events = [e for e in outcome.of_kind(Kind.SEGMENT) if e.iteration == last]
    writers = [e.role or 0 for e in events if e.data["boundary"] == "save"]
    # A boundary may be saved again at the next size.
    if saved.exists() and all(role - rank_of(role) == first for role in writers):
        # Extras are in the run's folder alone.
        known = ("common.args", "files")
        found = [line for line in differences(leg.saves, saved) if not line.startswith(known)]
        found = [line for line in found if not _is_between_parameters(leg.saves, saved, line)]
        assert not found, (where, found)


def _is_between_parameters(saved: Path, other: Path, line: str) -> bool:
    """Return whether a difference is only of memory between parameters, which is never written:
    less than the alignment in a row."""
    key, _, kind = line.rpartition(": ")
    if ".bucket_idx_" not in key or kind != "other bytes":
        return False
    first, second = (contents(folder)[0][key].view(torch.int32) for folder in (saved, other))
    places = (first != second).nonzero().view(-1)
    return all(
        bool(places[at + _ALIGNMENT - 1] - places[at] >= _ALIGNMENT)
        for at in range(len(places) - _ALIGNMENT + 1)
    )
