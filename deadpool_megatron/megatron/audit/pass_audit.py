"""Audits of passes: every replica computes the same micro-batch, and the results are compared.

Data-parallel replicas hold the same weights. In an audited iteration a replica, another in each
audit, sends its first micro-batch and its random states to the other replicas. Each replica runs
the micro-batch through its whole pipeline, before its own micro-batches and without reducing
gradients. Then all roles compare sums of the output of each stage, of the gradient that came back
to the stage, and of the gradients of its weights. The first wrong result in a replica's pipeline is
the origin of the error. An interleaved pipeline cannot run a single micro-batch: it runs the same
micro-batch as often as its minimum requires, and each chunk of a role is a stage.

The passes leave no trace: gradients are zeroed, and state that a forward pass changes is restored.
The first audit of a process checks that equal passes give equal bytes: it computes the micro-batch
twice (flash attention, for example, adds in any order).

Megatron's rerun machine and torchtitan's replay have the same idea, but repeat a step on the same
device.
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

from deadpool_megatron.megatron import loop as loops, loop_extras as extras
from deadpool_megatron.megatron.audit import comparison
from deadpool_megatron.megatron.audit.update_transfer import broadcast_bytes
from deadpool_megatron.megatron.loop import ForwardBackward, MegatronLoop
from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.member.peer_comparison import current_device
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.parts import fingerprint

_BATCHES = "batches"
# Whether equal passes give equal bytes, as far as a process knows; roles agree on the lowest value.
# The first two end the audits: the batches cannot be sent, or a role has given up before.
_UNSENDABLE, _GIVEN_UP, _UNTESTED, _REPEATABLE = range(4)
# Fields of the configuration: functions for communication that Megatron's schedules call.
SYNCHRONISING = ("finalize_model_grads_func", "grad_sync_func", "no_sync_func", "param_sync_func")


def incomparable_reason(loop: MegatronLoop) -> str:
    """Return the reason why passes of this model are not compared; empty where they are."""
    if getattr(loops.model_config(loop), "num_moe_experts", None):
        return "experts of several replicas work on the tokens of each other"
    if loops.trains_in_fp8(loop):
        return "FP8 keeps scales that a pass changes"
    if dist.get_world_size(parallel_state.get_data_parallel_group()) < 2:
        return "there are no data-parallel peers"
    return ""


class PassAudit(comparison.Auditor):
    """The audits of passes of a role in a process."""

    #: the seconds that the audit of this iteration took
    seconds = 0.0
    _is_repeatable: bool | None = None

    def announce(self, iteration: int, number: int | None) -> None:
        """Announce the next iteration, with the ``number`` of its audit, or None."""
        self._iteration, self._number, self.seconds = iteration, number, 0.0

    def around(self, forward_backward: ForwardBackward) -> ForwardBackward:
        """Wrap Megatron's function so that a due audit runs before it."""

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
        """Compare the passes of a micro-batch; return the data iterator with the batch put back."""
        data = arguments["data_iterator"]
        iterators = list(data) if isinstance(data, list) else [data]
        group = parallel_state.get_data_parallel_group()
        replicas = dist.get_process_group_ranks(group)
        source = replicas[number % len(replicas)]
        reads_data = [iterator is not None for iterator in iterators]
        batches: dict[int, Any] = {}
        for at, iterator in enumerate(iterators):
            if iterator is not None and source == dist.get_rank():
                batches[at] = next(iterator)
                iterators[at] = _put_back(batches[at], iterator)
        agreed = self._agree(batches.values())
        data = iterators if isinstance(data, list) else iterators[0]
        if agreed is None:
            return data
        shared = self._share(batches, source, group)
        kept = codec.encode(extras.capture_passing(self._loop))
        try:
            audited = dict(arguments, num_microbatches=self._min_micro_batches())
            run = functools.partial(self._run, forward_backward, audited, shared, reads_data)
            first = run()
            repeated = agreed != _UNTESTED or torch.equal(first, run())
            # The newest generation is committed first: reporting a mismatch ends the epoch.
            self._await_committed()
            repeat = run if agreed == _REPEATABLE else None
            mismatch = self._judge(*self._gather(first, repeated=repeated), repeat)
        finally:
            extras.restore_passing(self._loop, codec.decode(kept))
        self._stop_if_wrong(mismatch)
        return data

    def _min_micro_batches(self) -> int:
        """Return the minimum number of micro-batches of the pipeline, as in
        megatron/core/pipeline_parallel/schedules.py."""
        if len(self._loop.model_chunks) == 1:
            return 1
        return int(loops.model_config(self._loop).microbatch_group_size_per_vp_stage)

    def _agree(self, batches: Iterable[Any]) -> int | None:
        """Return _UNTESTED or _REPEATABLE, the same on all roles, or None if audits end. Roles have
        to agree, since a process that joined later knows less than others."""
        state = {None: _UNTESTED, False: _GIVEN_UP, True: _REPEATABLE}[self._is_repeatable]
        if state != _GIVEN_UP and not all(map(_has_named_tensors, batches)):
            state = _UNSENDABLE
        flag = torch.tensor([state], dtype=torch.int64, device=current_device())
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        agreed = int(flag.item())
        if agreed == _UNSENDABLE and self._is_repeatable is not False:
            self._give_up("the data loader gives something else than tensors by name")
        if agreed in (_UNSENDABLE, _GIVEN_UP):
            self._is_repeatable = False
            return None
        return agreed

    def _share(
        self, batches: Mapping[int, Any], source: int, group: dist.ProcessGroup
    ) -> dict[str, Any]:
        """Return the micro-batch of each chunk that reads data, and random states of ``source``."""
        payload = b""
        if source == dist.get_rank():
            named = {str(chunk): dict(batch) for chunk, batch in batches.items()}
            payload = codec.encode({_BATCHES: named, **extras.random_states()})
        return codec.decode(broadcast_bytes(payload, source, group, current_device()))

    def _run(
        self,
        forward_backward: ForwardBackward,
        arguments: dict[str, Any],
        shared: dict[str, Any],
        reads_data: Sequence[bool],
    ) -> Tensor:
        """Run the micro-batch through the pipeline. Return for each chunk the sums of its output,
        of the gradient that came back, and of its weights' gradients: shape (chunks, 3, 2)."""
        device, chunks = current_device(), self._loop.model_chunks
        times = arguments["num_microbatches"]
        sums = torch.zeros(len(chunks), 3, 2, dtype=torch.int64, device=device)

        def add_sums(own: Tensor, _module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self._damage("audit.pass", [output])
                _add(own[0], device, output)
                if output.requires_grad:
                    add_returned = functools.partial(_add, own[1], device)
                    output.register_hook(add_returned)  # type: ignore[no-untyped-call]

        extras.set_random_states(shared)
        data: list[Any] = [
            # Each pass gets a copy, since it may remove entries.
            iter([dict(shared[_BATCHES][str(at)]) for _ in range(times)]) if reads else None
            for at, reads in enumerate(reads_data)
        ]
        with contextlib.ExitStack() as stack:
            for chunk, own in zip(chunks, sums, strict=True):
                hook = chunk.register_forward_hook(functools.partial(add_sums, own))
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
        """Keep gradients local, as Megatron does for every micro-batch but the last."""
        unset = replaced(loops.model_config(self._loop), **dict.fromkeys(SYNCHRONISING))
        with unset, contextlib.ExitStack() as stack:
            for chunk in self._loop.model_chunks:
                stack.enter_context(chunk.no_sync())
            yield

    def _gather(
        self, sums: Tensor, *, repeated: bool
    ) -> tuple[dict[int, comparison.Pass], dict[int, bool]]:
        """Return the passes of all chunks of all roles, and whether a repetition gave the same
        bytes; a chunk of a role has a single number (:meth:`_roles`)."""
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
        chunks, ranks = len(sums), 1 + max(row[1] for row in found)
        passes: dict[int, comparison.Pass] = {}
        for role, (replica, rank, peer, _, hardware, *values) in enumerate(found):
            for chunk in range(chunks):
                starts = range(6 * chunk, 6 * chunk + 6, 2)
                output, returned, gradient = (tuple(values[at : at + 2]) for at in starts)
                stage, place = chunk * ranks + rank, peer * chunks + chunk
                passes[role * chunks + chunk] = comparison.Pass(
                    replica, stage, place, output, returned, gradient, hardware
                )
        return passes, {number: bool(found[number // chunks][3]) for number in passes}

    def _roles(self, numbers: Iterable[int]) -> list[int]:
        """Return the roles of the chunks with these numbers."""
        return sorted({number // len(self._loop.model_chunks) for number in numbers})

    def _judge(
        self,
        passes: Mapping[int, comparison.Pass],
        repeated: Mapping[int, bool],
        repeat: Callable[[], Tensor] | None,
    ) -> comparison.Mismatch | None:
        """Return the mismatch of the passes, if any. Without a majority all peers ``repeat`` the
        passes, and a role whose result changes has an intermittent fault. ``repeat`` is None on all
        roles if the passes were repeated already."""
        keys = comparison.comparison_keys(passes)
        is_same = {number: (keys[number], same) for number, same in repeated.items()}
        if bad := comparison.unrepeatable_roles(is_same):
            reason = f"the same pass gives other bytes each time, of roles {self._roles(bad)}"
            self._give_up(f"{reason} (try --deterministic-mode)")
            return None
        self._is_repeatable = True
        if len({each.hardware for each in passes.values()}) > 1:
            self._report_incomparable(self._roles(comparison.without_peers(keys)), "the passes")
        mismatch = comparison.compare_passes(passes)
        if mismatch is not None and not mismatch.is_certain and repeat is not None:
            again, _ = self._gather(repeat(), repeated=True)
            mismatch = comparison.compare_repeated_passes(passes, again) or mismatch
        return mismatch and replace(mismatch, roles=tuple(self._roles(mismatch.roles)))

    def _give_up(self, reason: str) -> None:
        self._is_repeatable = False
        self._warn(f"audits do not compare passes: {reason}")


def _add(sums: Tensor, device: torch.device, tensor: Tensor) -> None:
    sums += fingerprint([tensor], device)


def _put_back(batch: Any, iterator: Any) -> Iterator[Any]:
    """Return the iterator with ``batch`` before it; Megatron's iterators have only ``__next__``."""
    return itertools.chain([batch], iter(lambda: next(iterator), object()))


def _has_named_tensors(batch: Any) -> bool:
    return isinstance(batch, Mapping) and all(
        value is None or isinstance(value, Tensor) for value in batch.values()
    )


@contextlib.contextmanager
def _rerun_machine_idle() -> Iterator[None]:
    """Keep the passes of an audit from Megatron's rerun machine, which checks every result.

    The machine judges no results meanwhile (except NaN, if the machine is off). Afterwards it has
    the same counts, largest values and requests for a rerun as before."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is None:
        yield
        return
    kept = {k: v.copy() if isinstance(v, dict) else v for k, v in vars(machine).items()}
    # The machine judges no results in its first run.
    machine.state = rerun_state_machine.RerunState.INITIAL_RUN
    machine.first_iteration_complete = False
    machine.rerun_requested = False
    try:
        yield
    finally:
        vars(machine).update(kept)
