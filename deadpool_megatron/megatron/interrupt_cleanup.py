"""Removes the remains of an interrupted step from Megatron's objects: a function for each kind.

:meth:`InterruptCleanup.forget` calls all functions before each restore. Two remains are dropped
earlier, as soon as no operation can write any more: the frames of the exception
(``member/session.py``), and the list that c10d's coalescing manager leaves on a group
(``comms/communicators.py``). A program resets its own remains, such as iterators, in
``ProtectedLoop.reset_after_interrupt``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state, rerun_state_machine
from megatron.core.pipeline_parallel import fine_grained_activation_offload
from megatron.core.transformer import transformer_block
from megatron.core.transformer.moe import fused_a2a

from deadpool_megatron.megatron import fp8
from deadpool_megatron.megatron.loop import MegatronLoop, model_config
from deadpool_megatron.megatron.optimizer import inner_optimizers

_SCHEDULE_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func")
# Values that an overlapped pass of shared experts hands from part to part.
_PARTS_OF_SHARED_EXPERTS = (
    "cached_fc1_input",
    "cached_fc2_input",
    "cached_fc2_output",
    "cached_output",
)
# Fields of a model's config, in the order in which get_cpu_offload_context() takes them. In 0.16 it
# does not take the last.
OFFLOADING = (
    "cpu_offloading",
    "cpu_offloading_num_layers",
    "num_layers",
    "cpu_offloading_activations",
    "cpu_offloading_weights",
    "cpu_offloading_double_buffering",
    "cpu_offloading_retain_pinned_cpu_buffers",
)


class InterruptCleanup:
    """The intact state of a loop that was just built: :meth:`forget` restores it."""

    def __init__(self, loop: MegatronLoop) -> None:
        self.loop = loop
        config, machine = model_config(loop), rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
        self.functions = {name: getattr(config, name, None) for name in _SCHEDULE_FUNCTIONS}
        self.gathers_ahead = [bool(_forward_hooks(chunk)) for chunk in loop.model_chunks]
        self.rerun_mode = None if machine is None else machine.get_mode()
        self.never_trained = [module for module in self.modules() if not module.training]
        # Which activations are offloaded affects strides, and strides affect the last bits. A step
        # that learns which to offload, as after an interrupt, has to compute like all other steps.
        handler: Any = fine_grained_activation_offload.ChunkOffloadHandler
        handler.should_bulk_offload = lambda *_: True

    def modules(self) -> Iterator[Any]:
        """Yield the modules of all chunks."""
        for chunk in self.loop.model_chunks:
            yield from chunk.modules()

    def forget(self) -> None:
        """Clear all remains, without communication. Main thread, when no operation can write."""
        for clear in TABLE:
            clear(self)


def gather_buffers(_: InterruptCleanup) -> None:
    """Drop gathered activations from parallel_state's global memory buffer: an abandoned operation
    may have half-written them."""
    parallel_state.get_global_memory_buffer().buffer.clear()


def schedule(intact: InterruptCleanup) -> None:
    """Restore the schedule's functions in the config of the model: the interleaved schedule
    replaces them, and restores them only when no exception passes."""
    config = model_config(intact.loop)
    for name, function in intact.functions.items():
        setattr(config, name, function)


def virtual_stage(_: InterruptCleanup) -> None:
    """Reset the virtual stage in parallel_state: the next step would begin in the middle of the
    model."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)


def timers(intact: InterruptCleanup) -> None:
    """Reset started timers in the configs of model and optimizers: they could not be started
    again."""
    # An evaluation removes the timers from the config of the model.
    inner = (getattr(each, "config", None) for each in inner_optimizers(intact.loop.optimizer))
    for config in (model_config(intact.loop), *inner):
        for timer in getattr(getattr(config, "timers", None), "_timers", {}).values():
            if timer._started:
                timer.reset()


def rerun(intact: InterruptCleanup) -> None:
    """Reset the rerun state machine, which may be in a run or in the mode of an evaluation: it
    would take the next run for done, and the update would come without a forward and backward
    pass."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is not None:
        machine.state = rerun_state_machine.RerunState.NOT_RUNNING_YET
        machine.set_mode(intact.rerun_mode)


def logits(intact: InterruptCleanup) -> None:
    """Drop the largest logits of attention modules: they would be logged as those of the next
    step."""
    for module in intact.modules():
        if getattr(module, "current_max_attn_logits", None) is not None:
            module.current_max_attn_logits = None


def buckets(intact: InterruptCleanup) -> None:
    """Reset the bucket groups of the chunks and of the distributed optimizers: handles, counts of
    ready parameters, and the order of the first batch. A new process reduces at the end of its
    first backward pass, and during later passes; all roles must reduce in the same order."""
    for bucket_group in bucket_groups(intact.loop):
        bucket_group.grad_reduce_handle = None
        if hasattr(bucket_group, "grad_reduce_finished"):  # since 0.18
            bucket_group.grad_reduce_finished = False
        bucket_group.param_gather_handle = None
        bucket_group.param_gather_dispatched = False
        bucket_group.per_param_grad_ready_counts = {}
        bucket_group.golden_per_param_grad_ready_counts = {}
        bucket_group.is_first_batch = True
        bucket_group.is_last_microbatch = True


def groups_of_norms(intact: InterruptCleanup) -> None:
    """Drop the optimizers' lists of groups that have gradient norms: a new process gathers its list
    from all roles in its first step, and roles with a list would not take part."""
    for optimizer in (intact.loop.optimizer, *inner_optimizers(intact.loop.optimizer)):
        if hasattr(optimizer, "_has_grad_norm_group_cache"):  # since 0.19
            optimizer._has_grad_norm_group_cache = None


def gathers_ahead(intact: InterruptCleanup) -> None:
    """Enable the chunks' forward pre-hooks, which gather parameters ahead of the forward pass:
    loops remove the hooks for an evaluation or a save, and add them again at its end."""
    for chunk, gathers_ahead in zip(intact.loop.model_chunks, intact.gathers_ahead, strict=True):
        if gathers_ahead and not _forward_hooks(chunk):
            chunk.enable_forward_pre_hook()


def gradients(intact: InterruptCleanup) -> None:
    """Zero the gradients in buffers of the chunks and of parameters: the next step would add to
    them."""
    for chunk in intact.loop.model_chunks:
        chunk.zero_grad_buffer()
        chunk.force_all_reduce = False
    intact.loop.optimizer.zero_grad()


def training_mode(intact: InterruptCleanup) -> None:
    """Leave the evaluation mode, in which dropout is off, in all modules except those that were
    built in it, such as a frozen teacher."""
    for chunk in intact.loop.model_chunks:
        chunk.train()
    for module in intact.never_trained:
        module.training = False


def fp8_state(intact: InterruptCleanup) -> None:
    """Reset the depth of regions, recomputations and cached weights in Transformer Engine's
    process-wide FP8 state: the next step would use scaling factors of another micro-batch, and
    reduce another number of times."""
    fp8.reset_in_flight(intact.loop.model_chunks)


def shared_experts(intact: InterruptCleanup) -> None:
    """Drop half of an overlapped pass from shared experts: the next pass may not begin before its
    end."""
    for module in intact.modules():
        if hasattr(module, _PARTS_OF_SHARED_EXPERTS[0]):
            for name in _PARTS_OF_SHARED_EXPERTS:
                setattr(module, name, None)
            if hasattr(module, "_overlap_state"):  # since 0.18
                module._overlap_state = type(module._overlap_state).IDLE


def embedding_gradients(intact: InterruptCleanup) -> None:
    """Drop the activations and gradients that wait, in the last stage, for the end of the
    pipeline's backward passes: schedules empty only the list of activations, so the next step would
    make wrong pairs."""
    for module in intact.modules():
        for name in ("embedding_activation_buffer", "grad_output_buffer"):
            if waiting := getattr(module, name, None):
                waiting.clear()


def delayed_gradients(intact: InterruptCleanup) -> None:
    """Drop delayed gradients of weights from queues of Transformer Engine's modules: the next pass
    would take the oldest for its own."""
    for module in intact.modules():
        waiting = getattr(getattr(module, "wgrad_store", None), "context", None)
        if waiting is not None:
            waiting.queue.clear()


def offloaded_activations(_: InterruptCleanup) -> None:
    """Drop the process-wide manager of offloaded activations, with chunks, groups and copies under
    way: the next step would begin in the middle. A new manager learns again what to offload, and
    all roles exchange that, so all roles must have a new manager."""
    fine_grained_activation_offload.PipelineOffloadManager.OFFLOAD_MGR = None


def offloaded_layers(intact: InterruptCleanup) -> None:
    """Make Transformer Engine's context of offloaded layers again in each block: its next layer
    would be a wrong layer."""
    make = transformer_block.get_cpu_offload_context
    for block in intact.modules():
        if isinstance(block, transformer_block.TransformerBlock) and block.config.cpu_offloading:
            count = len(inspect.signature(make).parameters)
            context, commit = make(*(getattr(block.config, name) for name in OFFLOADING[:count]))
            block.offload_context = block.config._cpu_offloading_context = context
            block.group_prefetch_offload_commit_async = commit


def expert_buffers(_: InterruptCleanup) -> None:
    """Drop the process-wide memory of DeepEP and Hybrid-EP, into which peers write: these libraries
    keep it for a group, which outlives the peers."""
    fused_a2a._buffer = fused_a2a._hybrid_ep_buffer = None


def captured_graphs(intact: InterruptCleanup) -> None:
    """Drop the graphs that Transformer Engine has captured on layers: they hold communicators.
    train() captures them again after its first steps, on all roles alike."""
    for module in intact.modules():
        for graph in getattr(module, "cuda_graphs", ()):
            if hasattr(graph, "reset"):  # since Transformer Engine 2.10
                graph.reset()
        if hasattr(module, "cuda_graphs"):
            module.cuda_graphs, module.cuda_graph_manual_hooks = [], []


# Each docstring names the remains, their place, and what they would cause.
TABLE = (
    gather_buffers,
    schedule,
    virtual_stage,
    timers,
    rerun,
    logits,
    buckets,
    groups_of_norms,
    gathers_ahead,
    gradients,
    training_mode,
    fp8_state,
    shared_experts,
    embedding_gradients,
    delayed_gradients,
    offloaded_activations,
    offloaded_layers,
    expert_buffers,
    captured_graphs,
)


def bucket_groups(loop: MegatronLoop) -> Iterator[Any]:
    """Yield the bucket groups of the DDP chunks, and their twins in the distributed optimizers."""
    for chunk in loop.model_chunks:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups
    for inner in inner_optimizers(loop.optimizer):
        for groups in getattr(inner, "per_model_bucket_groups", {}).values():
            yield from groups


def _forward_hooks(chunk: Any) -> Any:
    """Return the hooks with which a chunk gathers parameters just before it needs them."""
    return getattr(chunk, "remove_forward_pre_hook_handles", {})
