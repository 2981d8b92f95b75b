"""Data parallelism: what peers have restored for each other, and parameters from their shards."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import parallel_state

from deadpool_megatron.hooks.capture import fp8
from deadpool_megatron.hooks.capture.optimizer import (
    SharedCapture,
    inner_optimizers,
    is_distributed,
    plain_tensors,
)
from deadpool_megatron.hooks.dimensions.dimension import (
    DimensionHook,
    compare_with_peers,
    parameters,
)
from deadpool_megatron.hooks.interrupt_cleanup import bucket_groups
from deadpool_megatron.hooks.loop import ProtectedLoop


class DataHook(DimensionHook):
    """Groups: data and expert-data. Peers hold equal parameters after an all-gather.

    ``shared``: state that they have captured, and restored, a part of each.
    """

    name = "data"

    def __init__(self, loop: ProtectedLoop, shared: Sequence[SharedCapture] = ()) -> None:
        self._loop = loop
        self._shared = shared

    def rebuild_from_peers(self) -> None:
        """Master weights -> model copy -> all-gather over the group, forced.

        A missed forced sync does not hang: it trains on with other numbers (field-tested), so it is
        done after every restore, whatever the overlap flags say. Where FusedAdam holds the master
        weights the copy does nothing: the shard of the model itself was restored. Weights in FP8
        are cast anew, with the restored scales and amaxes.
        """
        for shared in self._shared:
            shared.gather()
        distributed = False
        for inner in inner_optimizers(self._loop.optimizer):
            if hasattr(inner, "_copy_main_params_to_model_params"):
                inner._copy_main_params_to_model_params()
            distributed = distributed or is_distributed(inner)
        if not distributed:
            return
        for chunk in self._loop.model_chunks:
            chunk.start_param_sync(force_sync=True)
        fp8.finish_gather(self._loop.model_chunks)
        for bucket_group in bucket_groups(self._loop):
            # As before a first step: nothing is known to be gathered for the next forward.
            bucket_group.param_gather_dispatched = False

    def verify(self) -> None:
        """Parameters must be equal over the group, expert ones over the experts' group; so must
        the state that peers have gathered."""
        for shared in self._shared:
            compare_with_peers(shared.tensors, shared.group, "the optimizer state")
        dense, expert = (
            [raw for parameter in found for raw in plain_tensors(parameter)]
            for found in (parameters(self._loop, expert=kind) for kind in (False, True))
        )
        data = parallel_state.get_data_parallel_group(with_context_parallel=True)
        compare_with_peers(dense, data, "parameters")
        if expert:
            experts = parallel_state.get_expert_data_parallel_group()
            compare_with_peers(expert, experts, "expert parameters")
