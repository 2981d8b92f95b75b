"""Remains of an interrupted step in Megatron: a table of state, place and consequence.

:meth:`InterruptCleanup.forget` clears them before each restore. Two remains are dropped earlier, as
soon as nothing can write any more: the frames of the exception (``member/session.py``), and the
list that c10d's coalescing manager leaves on a group (``comms/communicators.py``). A program resets
its own remains, such as iterators, in ``ProtectedLoop.reset_after_interrupt``.
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
# Values that an overlapped pass of shared experts passes between its parts.
_PARTS_OF_SHARED_EXPERTS = (
    "cached_fc1_input",
    "cached_fc2_input",
    "cached_fc2_output",
    "cached_output",
)
# In a model's config, in the order in which get_cpu_offload_context() takes them; 0.16 without the
# last.
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
    """The intact state of a loop that was just built: :meth:`forget` puts it back."""

    def __init__(self, loop: MegatronLoop) -> None:
        self.loop = loop
        config, machine = model_config(loop), rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
        self.functions = {name: getattr(config, name, None) for name in _SCHEDULE_FUNCTIONS}
        self.gathers_ahead = [bool(_forward_hooks(chunk)) for chunk in loop.model_chunks]
        self.rerun_mode = None if machine is None else machine.get_mode()
        self.never_trained = [module for module in self.modules() if not module.training]
        # The choice of offloaded activations decides about strides, and strides about last bits: a
        # step that learns what to offload, as after an interrupt, has to equal all others.
        handler: Any = fine_grained_activation_offload.ChunkOffloadHandler
        handler.should_bulk_offload = lambda *_: True

    def modules(self) -> Iterator[Any]:
        """Yield the modules of all chunks."""
        for chunk in self.loop.model_chunks:
            yield from chunk.modules()

    def forget(self) -> None:
        """Clear all remains, without communication. Main thread, when nothing can write."""
        for row in TABLE:
            row(self)


def gather_buffers(_: InterruptCleanup) -> None:
    """Gathered activations, in parallel_state's global memory buffer: an abandoned operation may
    have half-written them."""
    parallel_state.get_global_memory_buffer().buffer.clear()


def schedule(left: InterruptCleanup) -> None:
    """Functions of the schedule, in the config of the model: the interleaved schedule replaces them
    and puts them back only when no exception passes."""
    config = model_config(left.loop)
    for name, function in left.functions.items():
        setattr(config, name, function)


def virtual_stage(_: InterruptCleanup) -> None:
    """The virtual stage, in parallel_state: the next step would begin in the middle of the
    model."""
    if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(0)


def timers(left: InterruptCleanup) -> None:
    """Started timers, in the configs of model and optimizers: they cannot be started again."""
    # An evaluation takes them out of the config of the model.
    inner = (getattr(each, "config", None) for each in inner_optimizers(left.loop.optimizer))
    for config in (model_config(left.loop), *inner):
        for timer in getattr(getattr(config, "timers", None), "_timers", {}).values():
            if timer._started:
                timer.reset()


def rerun(left: InterruptCleanup) -> None:
    """A run in the middle, and the mode of an evaluation, in the rerun state machine: it would take
    the next run for done, an update without any forward and backward pass."""
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is not None:
        machine.state = rerun_state_machine.RerunState.NOT_RUNNING_YET
        machine.set_mode(left.rerun_mode)


def logits(left: InterruptCleanup) -> None:
    """Largest logits, of attention modules: they would be logged as those of the next step."""
    for module in left.modules():
        if getattr(module, "current_max_attn_logits", None) is not None:
            module.current_max_attn_logits = None


def buckets(left: InterruptCleanup) -> None:
    """Handles, ready counts, the order of the first batch, in bucket groups of the chunks and of
    the distributed optimizers: a new process reduces at the end of its first backward pass, later
    during the pass, and all roles must do so in the same order."""
    for bucket_group in bucket_groups(left.loop):
        bucket_group.grad_reduce_handle = None
        if hasattr(bucket_group, "grad_reduce_finished"):  # since 0.18
            bucket_group.grad_reduce_finished = False
        bucket_group.param_gather_handle = None
        bucket_group.param_gather_dispatched = False
        bucket_group.per_param_grad_ready_counts = {}
        bucket_group.golden_per_param_grad_ready_counts = {}
        bucket_group.is_first_batch = True
        bucket_group.is_last_microbatch = True


def groups_of_norms(left: InterruptCleanup) -> None:
    """The list of groups that have gradient norms, in the optimizers: a new process gathers it from
    all roles in its first step, and others would not take part."""
    for optimizer in (left.loop.optimizer, *inner_optimizers(left.loop.optimizer)):
        if hasattr(optimizer, "_has_grad_norm_group_cache"):  # since 0.19
            optimizer._has_grad_norm_group_cache = None


def gathers_ahead(left: InterruptCleanup) -> None:
    """Gathers ahead of the forward pass, forward pre-hooks of the chunks: loops take them off for
    an evaluation or a save, and put them on at its end."""
    for chunk, gathers_ahead in zip(left.loop.model_chunks, left.gathers_ahead, strict=True):
        if gathers_ahead and not _forward_hooks(chunk):
            chunk.enable_forward_pre_hook()


def gradients(left: InterruptCleanup) -> None:
    """Gradients, in buffers of the chunks and of parameters: they would be added to."""
    for chunk in left.loop.model_chunks:
        chunk.zero_grad_buffer()
        chunk.force_all_reduce = False
    left.loop.optimizer.zero_grad()


def training_mode(left: InterruptCleanup) -> None:
    """The evaluation mode of modules: dropout would be off, but a frozen teacher is built
    without."""
    for chunk in left.loop.model_chunks:
        chunk.train()
    for module in left.never_trained:
        module.training = False


def fp8_state(left: InterruptCleanup) -> None:
    """Depth of regions, recomputations and cached weights, in Transformer Engine's process-wide FP8
    state: scaling factors of another micro-batch, and other numbers of reductions."""
    fp8.reset_in_flight(left.loop.model_chunks)


def shared_experts(left: InterruptCleanup) -> None:
    """Half of an overlapped pass, in shared experts: the next pass may not begin before its end."""
    for module in left.modules():
        if hasattr(module, _PARTS_OF_SHARED_EXPERTS[0]):
            for name in _PARTS_OF_SHARED_EXPERTS:
                setattr(module, name, None)
            if hasattr(module, "_overlap_state"):  # since 0.18
                module._overlap_state = type(module._overlap_state).IDLE


def embedding_gradients(left: InterruptCleanup) -> None:
    """Activations and gradients that wait for the end of the pipeline's backward passes, in the
    last stage: schedules empty only the first list, so that the pairs would be others."""
    for module in left.modules():
        for name in ("embedding_activation_buffer", "grad_output_buffer"):
            if waiting := getattr(module, name, None):
                waiting.clear()


def delayed_gradients(left: InterruptCleanup) -> None:
    """The same of a layer's weights, in queues of Transformer Engine's modules: the next pass would
    take the oldest for its own."""
    for module in left.modules():
        waiting = getattr(getattr(module, "wgrad_store", None), "context", None)
        if waiting is not None:
            waiting.queue.clear()


def offloaded_activations(_: InterruptCleanup) -> None:
    """Chunks, groups and copies under way, in the process-wide manager of offloaded activations:
    the next step would begin in the middle. A new manager learns again what to offload, and all
    roles exchange that, so all must begin alike."""
    fine_grained_activation_offload.PipelineOffloadManager.OFFLOAD_MGR = None


def offloaded_layers(left: InterruptCleanup) -> None:
    """The next layer, in Transformer Engine's context of offloaded layers, which each block has: it
    would be another layer."""
    make = transformer_block.get_cpu_offload_context
    for block in left.modules():
        if isinstance(block, transformer_block.TransformerBlock) and block.config.cpu_offloading:
            count = len(inspect.signature(make).parameters)
            context, commit = make(*(getattr(block.config, name) for name in OFFLOADING[:count]))
            block.offload_context = block.config._cpu_offloading_context = context
            block.group_prefetch_offload_commit_async = commit


def expert_buffers(_: InterruptCleanup) -> None:
    """Memory that peers write into, of DeepEP and Hybrid-EP, process-wide: it is kept by the group,
    which outlives the peers."""
    fused_a2a._buffer = fused_a2a._hybrid_ep_buffer = None


def captured_graphs(left: InterruptCleanup) -> None:
    """Graphs that Transformer Engine has captured, on layers: they hold communicators. train()
    captures them again after its first steps, on all roles alike."""
    for module in left.modules():
        for graph in getattr(module, "cuda_graphs", ()):
            if hasattr(graph, "reset"):  # since Transformer Engine 2.10
                graph.reset()
        if hasattr(module, "cuda_graphs"):
            module.cuda_graphs, module.cuda_graph_manual_hooks = [], []


# A row each: the remains, their place, and the consequence.
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
    """Yield those of the DDP chunks, and their twins in the distributed optimizers."""
    for chunk in loop.model_chunks:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups
    for inner in inner_optimizers(loop.optimizer):
        for groups in getattr(inner, "per_model_bucket_groups", {}).values():
            yield from groups


def _forward_hooks(chunk: Any) -> Any:
    """Return the hooks with which a chunk gathers parameters just before it needs them."""
    return getattr(chunk, "remove_forward_pre_hook_handles", {})
