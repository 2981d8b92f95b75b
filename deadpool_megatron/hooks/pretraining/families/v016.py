"""Megatron-LM 0.16: asynchronous saves have their queue from the start."""

from __future__ import annotations

from deadpool_megatron.hooks.pretraining.families.family import Family, Place
from deadpool_megatron.hooks.pretraining.families.writers import abort_writers


class Megatron016(Family):
    """See :class:`Family`."""

    def common_save(self) -> Place:
        from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

        return Place(TorchCommonSaveStrategy, "save_common")

    def finalising(self) -> Place:
        from megatron.core.dist_checkpointing.strategies import torch

        return Place(torch, "save_state_dict_async_finalize")

    def drop_saves(self) -> None:
        from megatron.training import async_utils

        queue = async_utils._async_calls_queue
        abort_writers(queue)
        async_utils._async_calls_queue = type(queue)(persistent=queue.persistent)
