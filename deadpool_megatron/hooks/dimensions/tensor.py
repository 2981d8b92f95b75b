"""Tensor parallelism: parameters that are replicated over the group."""

from __future__ import annotations

from megatron.core import parallel_state

from deadpool_megatron.hooks.capture.optimizer import plain_tensors
from deadpool_megatron.hooks.dimensions.dimension import (
    DimensionHook,
    compare_with_peers,
    parameters,
)
from deadpool_megatron.hooks.loop import ProtectedLoop


class TensorHook(DimensionHook):
    """Groups: tensor-model-parallel. Peers hold equal norms, biases and routers."""

    name = "tensor"

    def __init__(self, loop: ProtectedLoop) -> None:
        self._loop = loop

    def rebuild_from_peers(self) -> None:
        """Nothing: a tensor shard is unique to its role in this dimension."""

    def verify(self) -> None:
        """Replicated parameters must be equal: a missed sum over the group shows here first."""
        replicated = [
            raw
            for parameter in parameters(self._loop, expert=False)
            if not getattr(parameter, "tensor_model_parallel", False)
            for raw in plain_tensors(parameter)
        ]
        group = parallel_state.get_tensor_model_parallel_group()
        compare_with_peers(replicated, group, "tensor-replicated parameters")
