"""Data parallelism: bucket groups in flight, and parameters derived from the peers' shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from deadpool_megatron.hooks.dimensions.dimension import (
    DimensionHook,
    compare_with_peers,
    parameters,
)
from deadpool_megatron.hooks.generations import fp8_state
from deadpool_megatron.hooks.generations.optimizer import (
    inner_optimizers,
    is_distributed,
    plain_tensors,
)
from deadpool_megatron.hooks.loop import ProtectedLoop


class DataHook(DimensionHook):
    """Groups: data and expert-data. Peers hold equal parameters after an all-gather."""

    name = "data"

    def __init__(self, loop: ProtectedLoop) -> None:
        self._loop = loop
        self._gathers_ahead = [bool(_forward_hooks(chunk)) for chunk in loop.model_chunks]

    def groups(self) -> Mapping[str, dist.ProcessGroup]:
        """Data-parallel group (context parallel included) and the experts' one."""
        return {
            "data": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "expert-data": parallel_state.get_expert_data_parallel_group(),
        }

    def reset_in_flight(self) -> None:
        """Forget handles and ready counts in both sets of bucket groups; zero the gradients.

        The counts of the first batch are dropped too: a newcomer launches its first reductions at
        the end of backward and later ones in backward, and all roles must launch in the same order.
        """
        for bucket_group in self._bucket_groups():
            bucket_group.grad_reduce_handle = None
            bucket_group.param_gather_handle = None
            bucket_group.param_gather_dispatched = False
            bucket_group.per_param_grad_ready_counts = {}
            bucket_group.golden_per_param_grad_ready_counts = {}
            bucket_group.is_first_batch = True
            bucket_group.is_last_microbatch = True
        for chunk, gathers_ahead in zip(self._loop.model_chunks, self._gathers_ahead, strict=True):
            # Loops take these hooks off for an evaluation or a save, and put them on at its end.
            if gathers_ahead and not _forward_hooks(chunk):
                chunk.enable_forward_pre_hook()
            chunk.zero_grad_buffer()
        self._loop.optimizer.zero_grad()
        # Amaxes are reduced over the data-parallel group, too.
        fp8_state.reset_in_flight(self._loop.model_chunks)

    def rebuild_from_peers(self) -> None:
        """Master weights -> model copy -> all-gather over the group, forced.

        A missed forced sync does not hang: it trains on with other numbers (field-tested), so it is
        done after every restore, whatever the overlap flags say. Where FusedAdam holds the master
        weights the copy does nothing: the shard of the model itself was restored. Weights in FP8
        are cast anew, with the restored scales and amaxes.
        """
        distributed = False
        for inner in inner_optimizers(self._loop.optimizer):
            if hasattr(inner, "_copy_main_params_to_model_params"):
                inner._copy_main_params_to_model_params()
            distributed = distributed or is_distributed(inner)
        if not distributed:
            return
        for chunk in self._loop.model_chunks:
            chunk.start_param_sync(force_sync=True)
        fp8_state.finish_gather(self._loop.model_chunks)
        for bucket_group in self._bucket_groups():
            # As before a first step: nothing is known to be gathered for the next forward.
            bucket_group.param_gather_dispatched = False

    def verify(self) -> None:
        """Parameters must be equal over the group, expert ones over the experts' group."""
        groups = self.groups()
        dense, expert = (
            [raw for parameter in found for raw in plain_tensors(parameter)]
            for found in (parameters(self._loop, expert=kind) for kind in (False, True))
        )
        compare_with_peers(dense, groups["data"], "parameters")
        if expert:
            compare_with_peers(expert, groups["expert-data"], "expert parameters")

    def _bucket_groups(self) -> Iterator[Any]:
        """Those of the DDP chunks and, made a second time, those of the distributed optimizers."""
        for chunk in self._loop.model_chunks:
            yield from chunk.bucket_groups
            yield from chunk.expert_parallel_bucket_groups
        for inner in inner_optimizers(self._loop.optimizer):
            for groups in getattr(inner, "per_model_bucket_groups", {}).values():
                yield from groups


def _forward_hooks(chunk: Any) -> Any:
    """The hooks with which a chunk gathers parameters just before it needs them."""
    return getattr(chunk, "remove_forward_pre_hook_handles", {})
