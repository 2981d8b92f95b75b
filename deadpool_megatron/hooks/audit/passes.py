"""One micro-batch of one replica, computed forward and backward by all of them.

Data-parallel replicas hold the same weights. In an audited iteration one replica (another one each
time) gives its first micro-batch, and its random states, to the others. Each runs it through its
whole pipeline, before its own micro-batches and without reducing gradients; then all roles compare
sums of what each stage gave on, of the gradient that came back to it, and of its weights'
gradients. Where in a replica the first of these is wrong, it was computed wrong.

Nothing of it stays: gradients are emptied, and what a forward pass changes is put back. Whether
equal passes give equal bytes here at all is shown before it is relied upon: the first audit of a
process computes the micro-batch twice (flash attention, for one, adds in any order).

After Megatron's rerun machine and torchtitan's replay, which repeat a step where it was computed.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from deadpool_megatron import failpoints
from deadpool_megatron.events import Kind
from deadpool_megatron.hooks.audit.hardware import hardware
from deadpool_megatron.hooks.audit.outcome import stop_if_wrong
from deadpool_megatron.hooks.audit.rerun import not_looking
from deadpool_megatron.hooks.audit.shipping import broadcast_bytes
from deadpool_megatron.hooks.audit.verdict import (
    Accusation,
    Pass,
    Sums,
    alone,
    comparable,
    judge_passes,
    judge_repeated_passes,
    unrepeatable,
)
from deadpool_megatron.hooks.dimensions.dimension import current_device
from deadpool_megatron.hooks.loop import ForwardBackward, ProtectedLoop, model_config
from deadpool_megatron.hooks.reports import Reports
from deadpool_megatron.hooks.training_state import extras
from deadpool_megatron.state import extras as codec
from deadpool_megatron.state.fingerprint import fingerprint

_BATCH = "batch."
# How far a role is with the rehearsal; of all roles the least counts.
_STRANGE, _LEFT, _REHEARSED, _RELIED_ON = range(4)
# What Megatron's schedules would do beside passes.
_SYNCHRONISING = (
    "finalize_model_grads_func",
    "grad_sync_func",
    "no_sync_func",
    "param_sync_func",
)


def why_not_compared(loop: ProtectedLoop) -> str:
    """Why passes of this model are not compared, in words; empty where they are."""
    config = model_config(loop)
    if len(loop.model_chunks) > 1:
        return "the pipeline is interleaved"
    if getattr(config, "num_moe_experts", None):
        return "experts of several replicas work on the tokens of each other"
    if getattr(config, "fp8", None):
        return "FP8 keeps scales that a pass changes"
    if dist.get_world_size(parallel_state.get_data_parallel_group()) < 2:
        return "there are no data-parallel peers"
    return ""


class PassAudit:
    """Of one role in one process. Main thread. All its communication ends with the epoch.

    ``settle`` waits until the newest generation is committed.
    """

    def __init__(self, loop: ProtectedLoop, settle: Callable[[], None], reports: Reports) -> None:
        self._loop = loop
        self._settle = settle
        self._reports = reports
        #: spent on the audit of this iteration
        self.seconds = 0.0
        self._iteration = 0
        # Of the replica whose micro-batch it is; None: this iteration is not audited.
        self._number: int | None = None
        self._is_repeatable: bool | None = None
        self._hardware = hardware(current_device())
        self._has_said_who_is_alone = False

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
        iterator = given[0] if isinstance(given, list) else given
        group = parallel_state.get_data_parallel_group()
        replicas = dist.get_process_group_ranks(group)
        source = replicas[number % len(replicas)]
        batch: Any = None
        if iterator is not None and source == dist.get_rank():
            batch = next(iterator)
            iterator = _put_back(batch, iterator)
        agreed = self._agree(batch)
        if agreed is None:
            return iterator
        shared = self._share(batch, source, group)
        kept = codec.encode(extras.capture_passing(self._loop))
        try:
            again = dict(arguments, num_microbatches=1)
            run = functools.partial(
                self._run, forward_backward, again, shared, iterator is not None
            )
            once = run()
            repeated = agreed != _REHEARSED or torch.equal(once, run())
            # Of all roles, before the first of them can accuse one: that ends the epoch.
            self._settle()
            once_more = run if agreed == _RELIED_ON else None
            verdict = self._judge(*self._gather(once, repeated=repeated), once_more)
        finally:
            extras.restore_passing(self._loop, codec.decode(kept))
        stop_if_wrong(self._reports, self._iteration, verdict)
        return iterator

    def _agree(self, batch: Any) -> int | None:
        """Whether all roles rehearse or rely on a rehearsal; None where they leave it. A process
        that came later knows less than others, and all have to do the same."""
        state = _RELIED_ON if self._is_repeatable else _REHEARSED
        if self._is_repeatable is False:
            state = _LEFT
        elif batch is not None and not _is_by_name(batch):
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

    def _share(self, batch: Any, source: int, group: dist.ProcessGroup) -> dict[str, Any]:
        """The micro-batch (in stages that read data) and the random states of ``source``."""
        payload = b""
        if source == dist.get_rank():
            values = {f"{_BATCH}{name}": value for name, value in (batch or {}).items()}
            payload = codec.encode({**values, **extras.random_states()})
        return codec.decode(broadcast_bytes(payload, source, group, current_device()))

    def _run(
        self,
        forward_backward: ForwardBackward,
        arguments: dict[str, Any],
        shared: dict[str, Any],
        reads_data: bool,
    ) -> Tensor:
        """The micro-batch through the pipeline; sums of what this stage gave on, got back and made,
        of shape (3, 2)."""
        device, chunk = current_device(), self._loop.model_chunks[0]
        batch = {
            name.removeprefix(_BATCH): value
            for name, value in shared.items()
            if name.startswith(_BATCH)
        }
        sums = torch.zeros(3, 2, dtype=torch.int64, device=device)

        def passed_on(_module: Any, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                self._damage("audit.pass", output)
                sums[0] += fingerprint([output], device)
                if output.requires_grad:
                    output.register_hook(came_back)  # type: ignore[no-untyped-call]

        def came_back(gradient: Tensor) -> None:
            sums[1] += fingerprint([gradient], device)

        extras.set_random_states(shared)
        data = iter([batch]) if reads_data else None
        hook = chunk.register_forward_hook(passed_on)
        try:
            with self._without_synchronising(chunk), not_looking():
                forward_backward(**{**arguments, "data_iterator": data})
        finally:
            hook.remove()
        gradients = [buffer.grad_data for buffer in chunk.buffers]
        sums[2] = fingerprint(gradients, device)
        chunk.zero_grad_buffer()
        return sums

    @contextlib.contextmanager
    def _without_synchronising(self, chunk: Any) -> Iterator[None]:
        """Gradients stay where they are, as those of any micro-batch but the last."""
        config = model_config(self._loop)
        kept = {name: getattr(config, name) for name in _SYNCHRONISING}
        for name in _SYNCHRONISING:
            setattr(config, name, None)
        try:
            with chunk.no_sync():
                yield
        finally:
            for name, value in kept.items():
                setattr(config, name, value)

    def _gather(self, sums: Tensor, *, repeated: bool) -> tuple[dict[int, Pass], list[bool]]:
        """The passes of all roles, and which of them were repeated to the same bytes."""
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
        passes = {
            role: Pass(one[0], one[1], one[2], *_three_sums(one[5:]), hardware=one[4])
            for role, one in enumerate(found)
        }
        return passes, [bool(one[3]) for one in found]

    def _judge(
        self,
        passes: Mapping[int, Pass],
        repeated: Sequence[bool],
        once_more: Callable[[], Tensor] | None,
    ) -> Accusation | None:
        """Where no majority tells who is wrong, all compute it ``once_more``, and who does not come
        to the same is: a fault that comes and goes shows so. It is None, for all roles alike, where
        that was done already."""
        keys = comparable(passes)
        odd = unrepeatable({role: (keys[role], same) for role, same in enumerate(repeated)})
        if odd:
            self._give_up(
                f"the same pass gives other bytes each time, of roles {odd} (try"
                " --deterministic-mode)"
            )
            return None
        self._is_repeatable = True
        if len({one.hardware for one in passes.values()}) > 1:
            self._say_who_is_alone(alone(keys))
        verdict = judge_passes(passes)
        if verdict is None or verdict.is_certain or once_more is None:
            return verdict
        again, _ = self._gather(once_more(), repeated=True)
        return judge_repeated_passes(passes, again) or verdict

    def _say_who_is_alone(self, roles: list[int]) -> None:
        if roles and not self._has_said_who_is_alone:
            self._has_said_who_is_alone = True
            self._warn(
                f"audits cannot judge the passes of roles {roles}: no data-parallel replica has the"
                " same hardware, driver and libraries"
            )

    def _give_up(self, why: str) -> None:
        self._is_repeatable = False
        self._warn(f"audits do not compare passes: {why}")

    def _warn(self, text: str) -> None:
        if dist.get_rank() == 0:
            self._reports.send_event(Kind.LOG, None, {"level": "warning", "text": text})

    def _damage(self, point: str, output: Tensor) -> None:
        if failpoints.hit(point, iteration=self._iteration) is None:
            return
        # Not detached: autograd would see that it was changed.
        value = output.data.reshape(-1)[:1].view(torch.uint8)
        value[-2] ^= 0x40


def _three_sums(values: Sequence[int]) -> tuple[Sums, Sums, Sums]:
    """Of the output, of what came back, of the gradient."""
    return tuple(values[:2]), tuple(values[2:4]), tuple(values[4:6])


def _put_back(batch: Any, iterator: Any) -> Iterator[Any]:
    """Megatron's has ``__next__`` only."""
    yield batch
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            return


def _is_by_name(batch: Any) -> bool:
    return isinstance(batch, Mapping) and all(
        value is None or isinstance(value, Tensor) for value in batch.values()
    )
