"""The dimensions of parallelism: state that peers along each can rebuild, and must hold equal.

Tensor-parallel peers hold replicas of some parameters, the first and the last pipeline stage hold
tied embeddings, and data-parallel peers rebuild parameters from the shards of all of them.
"""

from __future__ import annotations

import functools

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from deadpool_megatron.megatron import fp8, optimizer
from deadpool_megatron.megatron.loop import MegatronLoop
from deadpool_megatron.member.peer_comparison import compare_with_peers


def rebuild_from_peers(loop: MegatronLoop) -> None:
    """Derive the state that no slot holds: master weights -> model copy -> forced all-gather over
    the data-parallel group. Collective. Along the other dimensions each role restores its own
    layers and slices.

    A missed forced sync does not hang, but training continues with other numbers. So the sync
    follows every restore, whatever the overlap flags. Where FusedAdam holds the master weights the
    copy does nothing: the shard of the model itself was restored. Weights in FP8 are cast again,
    with the restored scales and amaxes. Where whole parameters are distributed, each rank gets the
    parameters of other ranks from their owners.
    """
    distributed = False
    for inner in optimizer.inner_optimizers(loop.optimizer):
        if hasattr(inner, "_copy_main_params_to_model_params"):
            inner._copy_main_params_to_model_params()
        distributed = distributed or optimizer.is_distributed(inner)
    for chain in optimizer.layer_wise(loop.optimizer):
        # Since 0.18 the buffers of the chunks may be cut so that each shard has whole parameters.
        if getattr(chain, "use_buffer_param_sync", False):
            distributed = True
        else:
            chain.allgather_params()
    if not distributed:
        return
    for chunk in loop.model_chunks:
        chunk.start_param_sync(force_sync=True)
    fp8.finish_gather(loop.model_chunks)


def verify(loop: MegatronLoop) -> None:
    """Compare the state that peers must hold equal. Collective; raises PeerMismatch."""
    verify_tensor(loop)
    verify_pipeline(loop)
    verify_data(loop)


def verify_tensor(loop: MegatronLoop) -> None:
    """Compare norms, biases and routers, which are replicated over the tensor-parallel group: a
    missed sum over that group shows here first."""
    # Each rank has the offsets of its own heads (--softmax-type learnable), but Megatron does not
    # mark them as tensor-parallel.
    of_heads = {
        id(parameter)
        for chunk in loop.model_chunks
        for name, parameter in chunk.named_parameters()
        if name.endswith("softmax_offset")
    }
    replicated = [
        raw
        for parameter in parameters(loop, expert=False)
        if not getattr(parameter, "tensor_model_parallel", False) and id(parameter) not in of_heads
        for raw in optimizer.plain_tensors(parameter)
    ]
    group = parallel_state.get_tensor_model_parallel_group()
    compare_with_peers(replicated, group, "tensor-replicated parameters")


def verify_pipeline(loop: MegatronLoop) -> None:
    """Compare the two copies of tied word embeddings, in the first and the last stage."""
    is_alone = parallel_state.get_pipeline_model_parallel_world_size() == 1
    if is_alone or not parallel_state.is_rank_in_embedding_group():
        return
    shared = [_shared_embedding(chunk) for chunk in loop.model_chunks]
    if tied := [weight for weight in shared if weight is not None]:
        group = parallel_state.get_embedding_group()
        compare_with_peers(tied, group, "tied word embeddings")


def verify_data(loop: MegatronLoop) -> None:
    """Compare parameters over the data-parallel group, those of experts over the experts' group."""
    data = parallel_state.get_data_parallel_group(with_context_parallel=True)
    compare_with_peers(plain_parameters(loop, expert=False), data, "parameters")
    if expert := plain_parameters(loop, expert=True):
        experts = parallel_state.get_expert_data_parallel_group()
        compare_with_peers(expert, experts, "expert parameters")


def parameters(loop: MegatronLoop, *, expert: bool) -> list[torch.nn.Parameter]:
    """Return the dense or expert parameters of all chunks, in module order."""
    return [
        parameter
        for chunk in loop.model_chunks
        for parameter in chunk.parameters()
        if (not getattr(parameter, "allreduce", True)) == expert
    ]


def plain_parameters(loop: MegatronLoop, *, expert: bool) -> list[Tensor]:
    """Return :func:`parameters` as plain tensors: quantised parameters as the tensors that they
    wrap."""
    chosen = parameters(loop, expert=expert)
    return [raw for parameter in chosen for raw in optimizer.plain_tensors(parameter)]


def _shared_embedding(chunk: object):  # type: ignore[no-untyped-def]
    """Return the chunk's copy of the tied embedding weight, or None where it has none."""
    get = functools.partial(get_attr_wrapped_model, chunk)
    if get("share_embeddings_and_output_weights") and (get("pre_process") or get("post_process")):
        return get("shared_embedding_or_output_weight")()
    return None
