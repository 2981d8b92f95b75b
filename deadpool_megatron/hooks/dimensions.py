"""The dimensions of parallelism: what peers along each can rebuild, and must hold equal.

Tensor: parameters that are replicated over the group. Pipeline: tied embeddings. Data: what peers
have restored for each other, and parameters from their shards.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from deadpool_megatron.hooks.capture import fp8
from deadpool_megatron.hooks.capture.optimizer import (
    SharedCapture,
    inner_optimizers,
    is_distributed,
    plain_tensors,
)
from deadpool_megatron.hooks.interrupt_cleanup import bucket_groups
from deadpool_megatron.hooks.loop import ProtectedLoop
from deadpool_megatron.state.packing import fingerprint


class PeerMismatch(RuntimeError):
    """After a restore, peers that must hold equal bytes do not; the message names them."""


class DimensionHook(ABC):
    """Registered once per built loop; all methods run on the member's main thread."""

    def __init__(self, loop: ProtectedLoop) -> None:
        self._loop = loop

    @abstractmethod
    def rebuild_from_peers(self) -> None:
        """Collectively derive what need not be restored from a slot."""

    @abstractmethod
    def verify(self) -> None:
        """Collectively compare what peers must hold equally. Raises PeerMismatch."""


class TensorHook(DimensionHook):
    """Groups: tensor-model-parallel. Peers hold equal norms, biases and routers."""

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


class PipelineHook(DimensionHook):
    """Groups: pipeline, embedding. Activations in flight die with the interrupted step's frames."""

    def rebuild_from_peers(self) -> None:
        """Nothing: each stage restores its own layers."""

    def verify(self) -> None:
        """The two copies of tied word embeddings must be equal."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        if not parallel_state.is_rank_in_embedding_group():
            return
        tied = [
            chunk_weight
            for chunk in self._loop.model_chunks
            if (chunk_weight := _shared_embedding(chunk)) is not None
        ]
        if tied:
            group = parallel_state.get_embedding_group()
            compare_with_peers(tied, group, "tied word embeddings")


class DataHook(DimensionHook):
    """Groups: data and expert-data. Peers hold equal parameters after an all-gather.

    ``shared``: state that they have captured, and restored, a part of each.
    """

    def __init__(self, loop: ProtectedLoop, shared: Sequence[SharedCapture] = ()) -> None:
        super().__init__(loop)
        self._shared = shared

    def rebuild_from_peers(self) -> None:
        """Master weights -> model copy -> all-gather over the group, forced.

        A missed forced sync does not hang: it trains on with other numbers (field-tested), so it is
        done after every restore, whatever the overlap flags say. Where FusedAdam holds the master
        weights the copy does nothing: the shard of the model itself was restored. Weights in FP8
        are cast again, with the restored scales and amaxes.
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


def compare_with_peers(tensors: Sequence[Tensor], group: dist.ProcessGroup, what: str) -> None:
    """Raise PeerMismatch unless all ranks of ``group`` hold bit-equal ``tensors``."""
    if dist.get_world_size(group) == 1:
        return
    device = tensors[0].device if tensors else current_device()
    own = fingerprint(tensors, device)
    seen = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(seen, own, group=group)
    odd = [
        role
        for role, other in zip(dist.get_process_group_ranks(group), seen, strict=True)
        if not torch.equal(other, own)
    ]
    if odd:
        raise PeerMismatch(f"{what} of roles {odd} differ from role {dist.get_rank()}")


def current_device() -> torch.device:
    """Returns where the groups communicate."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def parameters(loop: ProtectedLoop, *, expert: bool) -> list[torch.nn.Parameter]:
    """Dense or expert parameters of all chunks, in module order (Megatron marks experts so)."""
    return [
        parameter
        for chunk in loop.model_chunks
        for parameter in chunk.parameters()
        if (not getattr(parameter, "allreduce", True)) == expert
    ]


def _shared_embedding(chunk: object):  # type: ignore[no-untyped-def]
    """The chunk's copy of the tied embedding weight, or None where it has none."""
    if not get_attr_wrapped_model(chunk, "share_embeddings_and_output_weights"):
        return None
    if not (
        get_attr_wrapped_model(chunk, "pre_process")
        or get_attr_wrapped_model(chunk, "post_process")
    ):
        return None
    return get_attr_wrapped_model(chunk, "shared_embedding_or_output_weight")()
