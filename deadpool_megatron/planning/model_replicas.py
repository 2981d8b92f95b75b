"""The numbers of model replicas with which a command can train, from Megatron's arguments.

The arguments are those that Megatron has validated, or those that a command line names; an absent
argument has Megatron's default. A smaller number of replicas must train on the same batches: each
batch can be divided among the replicas, and the interleaved schedule can run. Numbers below half
of the full number are excluded, as the change would need more memory on a node than is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deadpool_megatron.layout.grid import Division, Grid
from deadpool_megatron.layout.sizes import Sizes, fixed_by_scheme
from deadpool_megatron.support import flags

_BATCH = "--global-batch-size"
# Names in Megatron's validated arguments, and on a command line.
_INTERLEAVED = (
    *("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"),
    "num_layers_per_virtual_pipeline_stage",
)
_GROUPS = ("microbatch_group_size_per_vp_stage", "microbatch_group_size_per_virtual_pipeline_stage")
# The search for a batch that allows more numbers ends at this multiple of the given batch.
_MAX_BATCH_FACTOR = 4


@dataclass(frozen=True)
class Workload:
    """The split of a model and its iterations. ``batches``: for each kind of iteration, the samples
    of its batch and of its micro-batch; ``group``: micro-batches in a group of the interleaved
    schedule, 0 for another schedule."""

    grid: Grid
    batches: tuple[tuple[int, int], ...] = ()
    group: int = 0

    @staticmethod
    def of(args: Any) -> Workload:
        """Return the workload in Megatron's arguments."""
        tp = _number(args, "tensor_model_parallel_size")
        pp = _number(args, "pipeline_model_parallel_size")
        grid = Grid(
            tp=tp,
            cp=_number(args, "context_parallel_size"),
            pp=pp,
            ep=_number(args, "expert_model_parallel_size"),
            etp=_number(args, "expert_tensor_parallel_size", tp),
            instances=_number(args, "num_distributed_optimizer_instances"),
            data_last=bool(getattr(args, "use_tp_pp_dp_mapping", False)),
        )
        is_interleaved = any(_number(args, name, 0) for name in _INTERLEAVED)
        group = max(_number(args, name, pp) for name in _GROUPS) if is_interleaved else 0
        return Workload(
            grid, tuple(dict.fromkeys(each for each in _batches(args) if each[0])), group
        )

    def problem(self, replicas: int, members_per_node: int = 1) -> str:
        """Return why ``replicas`` replicas cannot train on whole nodes; empty if they can."""
        return next(filter(None, self._problems(replicas, members_per_node)), "")

    def possible(self, full: int, members_per_node: int) -> tuple[int, ...]:
        """Return the numbers that can train, ascending, with ``full`` last."""
        smaller = range((full + 1) // 2, full)
        return *(n for n in smaller if not self.problem(n, members_per_node)), full

    def nearest_batch(self, full: int, members_per_node: int) -> Workload | None:
        """Return the workload with the nearest batch that allows more numbers; None if there is no
        such batch, or if there are several batches."""
        if len(self.batches) != 1:
            return None
        (batch, micro), count = self.batches[0], len(self.possible(full, members_per_node))
        steps = range(micro * full, _MAX_BATCH_FACTOR * batch, micro * full)
        for samples in sorted(steps, key=lambda samples: abs(samples - batch)):
            other = replace(self, batches=((samples, micro),))
            fits = not other.problem(full, members_per_node)
            if fits and len(other.possible(full, members_per_node)) > count:
                return other
        return None

    def _problems(self, replicas: int, members_per_node: int) -> Iterator[str]:
        for division in self.grid.divisions(replicas):
            yield division.problem
        members = replicas * self.grid.ranks
        yield Division("", members_per_node, "tp x cp x pp x dp", members).problem
        for samples, micro in self.batches:
            yield Division("", micro * replicas, _BATCH, samples).problem
            count, pipeline = samples // (micro * replicas), self.grid.pp
            if self.group and (count < self.group or 0 < count % self.group < pipeline):
                yield (
                    f"the interleaved schedule cannot run {count} micro-batches in groups of"
                    f" {self.group} on {pipeline} stages"
                )


def sizes_of(args: Any, given: Any, world_size: int, members_per_node: int) -> Sizes:
    """Return the sizes of a run of ``world_size`` roles at full size.

    ``given``: the arguments that the user has given. Without a given batch the run has one size:
    Megatron's default for the batch follows the number of replicas, and learning rates depend on
    the batch. Megatron's schedule of batches cannot be combined with a given batch.
    """
    work = Workload.of(args)
    full = world_size // work.grid.ranks
    possible = work.possible(full, members_per_node)
    reasons = [f"{row.shown}: {row.reason}" for row in flags.INELASTIC if row.applies(args)]
    if getattr(given, "global_batch_size", None) is None:
        reasons.append(f"{_BATCH} is not given: the default follows the number of replicas")
    if len(possible) < 2:
        problem = work.problem(full - 1, members_per_node) if full > 1 else ""
        reasons.append(problem or "there is no smaller number")
    return Sizes(work.grid.ranks, possible, grid=work.grid).fixed(next(iter(reasons), ""))


def sizes_of_command(
    tokens: Sequence[str], world_size: int, members_per_node: int, scheme: str
) -> Sizes:
    """Return the sizes of the run that a command line starts."""
    given = flags.named_arguments(tokens)
    return sizes_of(given, given, world_size, members_per_node).fixed(fixed_by_scheme(scheme))


def describe(tokens: Sequence[str], world_size: int, members_per_node: int, scheme: str) -> str:
    """Return a line with the sizes of a command line's run and the nearest batch that allows more
    sizes; empty for a single replica."""
    sizes = sizes_of_command(tokens, world_size, members_per_node, scheme)
    work, full = Workload.of(flags.named_arguments(tokens)), sizes.replicas[-1]
    if full < 2:
        return ""
    text = f"model replicas: {_in_order(sizes.replicas)}"
    text += f" only ({sizes.reason})" if sizes.reason else ""
    other = work.nearest_batch(full, members_per_node)
    if other is not None and sizes.replicas == work.possible(full, members_per_node):
        more = _in_order(other.possible(full, members_per_node))
        text += f"; with {_BATCH} {other.batches[0][0]}: {more}"
    return text


def _in_order(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, reversed(numbers)))


def _batches(args: Any) -> Iterator[tuple[int, int]]:
    """Yield batch and micro-batch of training, of evaluation, and of each step of a ramp-up."""
    batch, micro = _number(args, "global_batch_size", 0), _number(args, "micro_batch_size")
    if not batch:
        return
    yield batch, micro
    evaluated = _number(args, "eval_global_batch_size", batch)  # since 0.18
    yield evaluated, _number(args, "eval_micro_batch_size", micro)
    if isinstance(ramp := getattr(args, "rampup_batch_size", None), list):
        yield from ((samples, micro) for samples in range(int(ramp[0]), batch, int(ramp[1])))


def _number(args: Any, name: str, default: int = 1) -> int:
    value = getattr(args, name, None)
    return value if type(value) is int and value > 0 else default
