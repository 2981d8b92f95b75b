"""One micro-batch of one replica, computed forward and backward by all of them.

Data-parallel replicas hold the same weights. In an audited iteration one replica (another one each
time) gives its first micro-batch, and its random states, to the others. Each runs it through its
whole pipeline, before its own micro-batches and without reducing gradients; then all roles compare
sums of what each stage gave on, of the gradient that came back to it, and of its weights'
gradients. Where in a replica the first of these is wrong, it was computed wrong. An interleaved
pipeline takes no single micro-batch: the same one goes through it as often as it takes at least,
and each chunk of a role is a stage.

Nothing of it stays: gradients are emptied, and what a forward pass changes is put back. Whether
equal passes give equal bytes here at all is shown before it is relied upon: the first audit of a
process computes the micro-batch twice (flash attention, for one, adds in any order).

After Megatron's rerun machine and torchtitan's replay, which repeat a step where it was computed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, rerun_state_machine
from torch import Tensor

from deadpool_megatron.megatron import loop_extras as extras
from deadpool_megatron.megatron.audit import comparison
from deadpool_megatron.megatron.audit.update_transfer import broadcast_bytes
from deadpool_megatron.megatron.loop import (
    ForwardBackward,
    MegatronLoop,
    model_config,
    trains_in_fp8,
)
from deadpool_megatron.member.peer_comparison import current_device
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.parts import fingerprint

_BATCHES = "batches"
# How far a role is with the rehearsal; of all roles the least counts.
_STRANGE, _LEFT, _REHEARSED, _RELIED_ON = range(4)
# What Megatron's schedules would do beside passes.
SYNCHRONISING = (
    "finalize_model_grads_func",
    "grad_sync_func",
    "no_sync_func",
    "param_sync_func",
)


def incomparable_reason(loop: MegatronLoop) -> str:
    """Return why passes of this model are not compared, in words; empty where they are."""
    config = model_config(loop)
    if getattr(config, "num_moe_experts", None):
        return "experts of several replicas work on the tokens of each other"
    if trains_in_fp8(loop):
        return "FP8 keeps scales that a pass changes"
    if dist.get_world_size(parallel_state.get_data_parallel_group()) < 2:
        return "there are no data-parallel peers"
    return ""


class PassAudit(comparison.Auditor):
    """Of one role in one process."""

    #: spent on the audit of this iteration
    seconds = 0.0
    _is_repeatable: bool | None = None

    def announce(self, iteration: int, number: int | None) -> None:
        """The iteration about to come; ``number`` of its audit, None where it is not audited."""
        self._iteration, self._number, self.seconds = iteration, number, 0.0

    def around(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """Megatron's function, with an audit before it where one is due."""

        def passes(**arguments: Any) -> Any:
            number, self._number = self._number, None
            if number is not None:
                started = time.monotonic()
                arguments["data_iterator"] = self._compare(forward_backward, arguments, number)
                self.seconds = time.monotonic() - started
            return forward_backward(**arguments)

        return passes

    def _compare(
        self, forward_backward: ForwardBackward, arguments: Mapping[str, Any], number: int
    ) -> Any:
        """Returns the iterator with what was taken from it."""
        given = arguments["data_iterator"]
        iterators = list(given) if isinstance(given, list) else [given]
        group = parallel_state.get_data_parallel_group()
        replicas = dist.get_process_group_ranks(group)
        source = replicas[number % len(replicas)]
        reads_data = [one is not None for one in iterators]
        batches: dict[int, Any] = {}
        for at, one in enumerate(iterators):
            if one is not None and source == dist.get_rank():
                batches[at] = next(one)
                iterators[at] = _put_back(batches[at], one)
        agreed = self._agree(batches.values())
        given = iterators if isinstance(given, list) else iterators[0]
        if agreed is None:
            return given
        shared = self._share(batches, source, group)
        kept = codec.encode(extras.capture_passing(self._loop))
        try:
            again = dict(arguments, num_microbatches=self._min_micro_batches())
            run = functools.partial(self._run, forward_backward, again, shared, reads_data)
            once = run()
            repeated = agreed != _REHEARSED or torch.equal(once, run())
            # Of all roles, before the first of them can accuse one: that ends the epoch.
            self._settle()
            once_more = run if agreed == _RELIED_ON else None
            mismatch = self._judge(*self._gather(once, repeated=repeated), once_more)
        finally:
            extras.restore_passing(self._loop, codec.decode(kept))
        self._stop_if_wrong(mismatch)
        return given

    def _min_micro_batches(self) -> int:
        """Return how many a pipeline takes at least:
        megatron/core/pipeline_parallel/schedules.py."""
        if len(self._loop.model_chunks) == 1:
            return 1
        return int(model_config(self._loop).microbatch_group_size_per_vp_stage)

    def _agree(self, batches: Iterable[Any]) -> int | None:
        """Return whether all roles rehearse or rely on a rehearsal; None where they leave it. A
        process that came later knows less than others, and all have to do the same."""
        state = {None: _REHEARSED, False: _LEFT, True: _RELIED_ON}[self._is_repeatable]
        if state != _LEFT and not all(map(_is_by_name, batches)):
            state = _STRANGE
        flag = torch.tensor([state], dtype=torch.int64, device=current_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        agreed = int(flag.item())
        if agreed == _STRANGE and self._is_repeatable is not False:
            self._give_up("the data loader gives something else than tensors by name")
        if agreed in (_STRANGE, _LEFT):
            self._is_repeatable = False
            return None
        return agreed

    def _share(
        self, batches: Mapping[int, Any], source: int, group: dist.ProcessGroup
    ) -> dict[str, Any]:
        """The micro-batch of each chunk that reads data, and the random states of ``source``."""
        payload = b""
        if source == dist.get_rank():
            found = {str(chunk): dict(batch) for chunk, batch in batches.items()}
            payload = codec.encode({_BATCHES: found, **extras.random_states()})
        return codec.decode(broadcast_bytes(payload, source, group, current_device()))

    def _run(
        self,
        forward_backward: ForwardBackward,
        arguments: dict[str, Any],
        shared: dict[str, Any],
        reads_data: Sequence[bool],
    ) -> Tensor:
        """The micro-batch through the pipeline; for each chunk sums of what it gave on, got back
        and made, of shape (chunks, 3, 2)."""
        device, chunks = current_device(), self._loop.model_chunks
        times = arguments["num_microbatches"]
        sums = torch.zeros(len(chunks), 3, 2, dtype=torch.int64, device=device)

        def passed_on(own: Tensor, _module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self._damage("audit.pass", [output])
                _add(own[0], device, output)
                if output.requires_grad:
                    came_back = functools.partial(_add, own[1], device)
                    output.register_hook(came_back)  # type: ignore[no-untyped-call]

        extras.set_random_states(shared)
        data: list[Any] = [
            # Each time its own, for those that take things out of it.
            iter([dict(shared[_BATCHES][str(at)]) for _ in range(times)]) if reads else None
            for at, reads in enumerate(reads_data)
        ]
        with contextlib.ExitStack() as stack:
            for chunk, own in zip(chunks, sums, strict=True):
                hook = chunk.register_forward_hook(functools.partial(passed_on, own))
                stack.callback(hook.remove)
            stack.enter_context(self._without_synchronising())
            stack.enter_context(_rerun_machine_idle())
            forward_backward(**{**arguments, "data_iterator": data if len(chunks) > 1 else data[0]})
        for chunk, own in zip(chunks, sums, strict=True):
            own[2] = fingerprint([buffer.grad_data for buffer in chunk.buffers], device)
            chunk.zero_grad_buffer()
        return sums

    @contextlib.contextmanager
    def _without_synchronising(self) -> Iterator[None]:
        """Gradients stay where they are, as those of any micro-batch but the last."""
        config = vars(model_config(self._loop))
        kept = {name: config[name] for name in SYNCHRONISING}
        config.update(dict.fromkeys(SYNCHRONISING))
        try:
            with contextlib.ExitStack() as stack:
                for chunk in self._loop.model_chunks:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            config.update(kept)

    def _gather(
        self, sums: Tensor, *, repeated: bool
    ) -> tuple[dict[int, comparison.Pass], dict[int, bool]]:
        """The passes of all chunks of all roles (each a number, see :meth:`_roles`), and whether
        they were repeated to the same bytes."""
        own = [
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_pipeline_model_parallel_rank(),
            min(dist.get_process_group_ranks(parallel_state.get_data_parallel_group())),
            int(repeated),
            self._hardware,
        ]
        row = torch.cat([torch.tensor(own, dtype=torch.int64, device=sums.device), sums.flatten()])
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        found = torch.stack(rows).cpu().tolist()
        chunks, ranks = len(sums), 1 + max(one[1] for one in found)
        passes: dict[int, comparison.Pass] = {}
        for role, (replica, rank, peer, _, kind, *values) in enumerate(found):
            for chunk in range(chunks):
                at = 6 * chunk
                passes[role * chunks + chunk] = comparison.Pass(
                    replica,
                    chunk * ranks + rank,
                    peer * chunks + chunk,
                    output=tuple(values[at : at + 2]),
                    returned=tuple(values[at + 2 : at + 4]),
                    gradient=tuple(values[at + 4 : at + 6]),
                    hardware=kind,
                )
        return passes, {number: bool(found[number // chunks][3]) for number in passes}

    def _roles(self, numbers: Iterable[int]) -> list[int]:
        """Return whose chunks these are."""
        return sorted({number // len(self._loop.model_chunks) for number in numbers})

    def _judge(
        self,
        passes: Mapping[int, comparison.Pass],
        repeated: Mapping[int, bool],
        once_more: Callable[[], Tensor] | None,
    ) -> comparison.Mismatch | None:
        """Return where no majority tells who is wrong, all compute it ``once_more``, and who does
        not come to the same is: a fault that comes and goes shows so. It is None, for all roles
        alike, where that was done already."""
        keys = comparison.comparable(passes)
        odd = comparison.unrepeatable(
            {number: (keys[number], same) for number, same in repeated.items()}
        )
        if odd:
            self._give_up(
                f"the same pass gives other bytes each time, of roles {self._roles(odd)} (try"
                " --deterministic-mode)"
            )
            return None
        self._is_repeatable = True
        if len({one.hardware for one in passes.values()}) > 1:
            self._report_incomparable(self._roles(comparison.incomparable(keys)), "the passes")
        mismatch = comparison.compare_passes(passes)
        if mismatch is not None and not mismatch.is_certain and once_more is not None:
            again, _ = self._gather(once_more(), repeated=True)
            mismatch = comparison.compare_repeated_passes(passes, again) or mismatch
        return mismatch and replace(mismatch, roles=tuple(self._roles(mismatch.roles)))

    def _give_up(self, why: str) -> None:
        self._is_repeatable = False
        self._warn(f"audits do not compare passes: {why}")


def _add(sums: Tensor, device: torch.device, tensor: Tensor) -> None:
    sums += fingerprint([tensor], device)


def _put_back(batch: Any, iterator: Any) -> Iterator[Any]:
    """Megatron's has ``__next__`` only."""
    return itertools.chain([batch], iter(lambda: next(iterator), object()))


def _is_by_name(batch: Any) -> bool:
    return isinstance(batch, Mapping) and all(
        value is None or isinstance(value, Tensor) for value in batch.values()
    )


@contextlib.contextmanager
def _rerun_machine_idle() -> Iterator[None]:
    """Megatron's rerun machine looks at every result of a pass; a pass of an audit is none of them.

    Results are not judged (but for NaN, where the machine is off), and the machine has the same
    counts, largest values and wishes to run again afterwards as before."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is None:
        yield
        return
    kept = {
        name: value.copy() if isinstance(value, dict) else value
        for name, value in vars(machine).items()
    }
    # As in its very first run, in which it judges nothing.
    machine.state = rerun_state_machine.RerunState.INITIAL_RUN
    machine.first_iteration_complete = False
    machine.rerun_requested = False
    try:
        yield
    finally:
        vars(machine).update(kept)
