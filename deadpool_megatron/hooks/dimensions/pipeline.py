"""Pipeline parallelism: tied embeddings."""

from __future__ import annotations

from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model

from deadpool_megatron.hooks.dimensions.dimension import DimensionHook, compare_with_peers
from deadpool_megatron.hooks.loop import ProtectedLoop


class PipelineHook(DimensionHook):
    """Groups: pipeline, embedding. Activations in flight die with the interrupted step's frames."""

    name = "pipeline"

    def __init__(self, loop: ProtectedLoop) -> None:
        self._loop = loop

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
