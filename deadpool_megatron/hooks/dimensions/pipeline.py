"""Pipeline parallelism: the schedule's functions in the model config, and tied embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state, rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model

from deadpool_megatron.hooks.dimensions.dimension import DimensionHook, compare_with_peers
from deadpool_megatron.hooks.loop import ProtectedLoop, model_config

# The interleaved schedule replaces these and puts them back only when no exception passes
# (megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving).
_SCHEDULE_FUNCTIONS = ("no_sync_func", "grad_sync_func", "param_sync_func")


class PipelineHook(DimensionHook):
    """Groups: pipeline, embedding. Activations in flight die with the interrupted step's frames."""

    name = "pipeline"

    def __init__(self, loop: ProtectedLoop) -> None:
        self._loop = loop
        config = model_config(loop)
        self._functions = {name: getattr(config, name, None) for name in _SCHEDULE_FUNCTIONS}

    def groups(self) -> Mapping[str, dist.ProcessGroup]:
        """Pipeline and, on the stages that have one, embedding group."""
        groups = {"pipeline": parallel_state.get_pipeline_model_parallel_group()}
        if parallel_state.is_rank_in_embedding_group():
            groups["embedding"] = parallel_state.get_embedding_group()
        return groups

    def reset_in_flight(self) -> None:
        """Put the schedule's functions back and leave any virtual stage; stop what was started."""
        config = model_config(self._loop)
        for name, function in self._functions.items():
            setattr(config, name, function)
        _stop_timers(getattr(config, "timers", None))
        _end_rerun()
        _forget_logits(self._loop)
        if parallel_state.get_virtual_pipeline_model_parallel_world_size() is not None:
            parallel_state.set_virtual_pipeline_model_parallel_rank(0)

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


def _stop_timers(timers: Any) -> None:
    """A timer that an interrupted step has started cannot be started again."""
    for timer in getattr(timers, "_timers", {}).values():
        if timer._started:
            timer.reset()


def _end_rerun() -> None:
    """Have the rerun machine, where there is one, begin with a first run again.

    Left in the middle of a run it would take the next one for done, and the optimizer would step
    without any forward and backward pass (rerun_state_machine.py, should_run_forward_backward).
    """
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    if machine is not None:
        machine.state = rerun_state_machine.RerunState.NOT_RUNNING_YET


def _forget_logits(loop: ProtectedLoop) -> None:
    """Maxima that the interrupted forward passes have noted: QK-clip would take them for its own
    (dot_product_attention.py and the attention of TransformerEngine, current_max_attn_logits)."""
    for chunk in loop.model_chunks:
        for module in chunk.modules():
            if getattr(module, "current_max_attn_logits", None) is not None:
                module.current_max_attn_logits = None


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
