"""Inner groups without peers: collectives complete locally.

They behave as if every peer held the same data as this process: gathers copy the input of this rank
into each output, reduce-scatter and all-to-all copy this rank's chunk of it, and reductions change
no data. A receive, or a broadcast from another rank, gives zeros: as sizes and as indices zeros do
no harm, unlike memory that was never written. So a spare can build a model, an optimizer and data
loaders and run warm-up steps; object collectives unpickle their own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron.comms.in_flight.works import CompletedWork, tensors_in
from deadpool_megatron.comms.inner import EpochClosed, GroupSpec, InnerGroup


class DetachedBackend:
    """The c10d Backend of a detached group, which can be split without a communicator."""

    supports_splitting = True
    supports_coalescing = supports_time_estimate = supports_shrinking = False

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def name(self) -> str:
        """Return the library of the later backend, for DeviceMesh."""
        return self._kind

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Do nothing, as no operation waits."""


class DetachedGroup(InnerGroup):
    """A group without peers, of the size and rank of ``spec``."""

    detached = True

    def __init__(self, spec: GroupSpec) -> None:
        self._spec = spec
        self._backend = DetachedBackend("nccl" if spec.device.type == "cuda" else "gloo")

    def forward(
        self, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dist.Work:
        action = ACTIONS.get(operation)
        with torch.no_grad():
            if action is not None:
                action(self._spec.rank, self._spec.size, *args)
        outputs = list(tensors_in(args[0])) if args else []
        return CompletedWork(outputs)

    def backend(self) -> Any:
        return self._backend

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "_end_coalescing":
            return CompletedWork([])
        if method == "_get_sequence_number_for_group":
            return 0
        return None

    def monitored_barrier(self, timeout: timedelta | None, wait_all_ranks: bool) -> None:
        """Return at once, without peers."""


class ClosedGroup(InnerGroup):
    """A group between the drain of a closed epoch and the next attach or detach."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch

    def forward(self, operation: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
        raise EpochClosed(self._epoch, operation)

    def backend(self) -> NoReturn:
        raise EpochClosed(self._epoch, "_get_backend")

    def call(self, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        raise EpochClosed(self._epoch, method)

    def monitored_barrier(self, timeout: timedelta | None, wait_all_ranks: bool) -> NoReturn:
        raise EpochClosed(self._epoch, "monitored_barrier")


def _fit(target: Tensor, source: Tensor) -> None:
    """Copy as much of ``source`` as fits; zeros elsewhere."""
    if target.shape == source.shape:
        target.copy_(source)
        return
    flat = source.reshape(-1)
    count = min(target.numel(), flat.numel())
    filled = torch.zeros(target.numel(), dtype=target.dtype, device=target.device)
    filled[:count] = flat[:count]
    target.copy_(filled.reshape(target.shape))


def _gather(rank: int, size: int, outputs: Any, inputs: Any, *_: Any) -> None:  # noqa: ARG001
    if isinstance(inputs, Tensor):
        outputs, inputs = [outputs], [inputs]
    for targets, source in zip(outputs, inputs, strict=False):  # outputs are empty but at the root
        for target in targets:
            _fit(target, source)


def _allgather_coalesced(rank: int, size: int, lists: Any, inputs: Any, *_: Any) -> None:  # noqa: ARG001
    # An output list per rank, each with a tensor per input.
    for targets in lists:
        for target, source in zip(targets, inputs, strict=True):
            _fit(target, source)


def _gather_single(rank: int, size: int, output: Tensor, source: Tensor, *_: Any) -> None:  # noqa: ARG001
    _fit(output, source.reshape(-1).repeat(size))


def _scatter_single(rank: int, size: int, output: Tensor, source: Tensor, *_: Any) -> None:
    chunk = source.numel() // size
    _fit(output, source.reshape(-1)[rank * chunk : (rank + 1) * chunk])


def _each(action: Callable[..., None]) -> Callable[..., None]:
    def on_lists(rank: int, size: int, outputs: Any, inputs: Any, *_: Any) -> None:
        for output, source in zip(outputs, inputs, strict=True):
            action(rank, size, output, source)

    return on_lists


def _scatter(rank: int, size: int, outputs: Any, inputs: Any, *_: Any) -> None:  # noqa: ARG001
    if isinstance(outputs, Tensor):
        outputs, inputs = [outputs], [inputs]
    for output, parts in zip(outputs, inputs, strict=False):
        if parts:  # a scatter has inputs at the root only
            _fit(output, parts[rank])


def _receive(rank: int, size: int, tensors: Sequence[Tensor], *_: Any) -> None:  # noqa: ARG001
    for tensor in tensors:
        tensor.zero_()


def _broadcast(rank: int, size: int, tensors: Any, options: Any = None, *_: Any) -> None:  # noqa: ARG001
    root = options if isinstance(options, int) else getattr(options, "rootRank", rank)
    if root != rank:
        for tensor in tensors_in(tensors):
            tensor.zero_()


def _all_to_all(rank: int, size: int, outputs: Any, inputs: Any, *_: Any) -> None:  # noqa: ARG001
    for output in outputs:
        _fit(output, inputs[rank])


def _all_to_all_single(
    rank: int,
    size: int,
    output: Tensor,
    source: Tensor,
    output_sizes: Sequence[int] = (),
    input_sizes: Sequence[int] = (),
    *_: Any,
) -> None:
    received = torch.split_with_sizes(output, _sizes(output, size, output_sizes))
    sent = torch.split_with_sizes(source, _sizes(source, size, input_sizes))
    for part in received:
        _fit(part, sent[rank])


def _sizes(tensor: Tensor, size: int, given: Sequence[int]) -> list[int]:
    return list(given) or [tensor.shape[0] // size] * size


ACTIONS: dict[str, Callable[..., None]] = {
    "allgather": _gather,
    "allgather_coalesced": _allgather_coalesced,
    "all_gather_single": _gather_single,
    "_allgather_base": _gather_single,
    "all_gather_single_coalesced": _each(_gather_single),
    "allgather_into_tensor_coalesced": _each(_gather_single),
    "reduce_scatter": _scatter,
    "reduce_scatter_single": _scatter_single,
    "_reduce_scatter_base": _scatter_single,
    "reduce_scatter_single_coalesced": _each(_scatter_single),
    "reduce_scatter_tensor_coalesced": _each(_scatter_single),
    "gather": _gather,
    # On all ranks but the root, the output of a gather is empty.
    "gather_single": _gather_single,
    "gather_into_tensor": _gather_single,
    "scatter": _scatter,
    "broadcast": _broadcast,
    "recv": _receive,
    "recv_anysource": _receive,
    "alltoall": _all_to_all,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
}
