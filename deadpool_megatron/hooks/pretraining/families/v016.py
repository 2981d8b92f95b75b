"""Megatron-LM 0.16: asynchronous saves have their queue from the start."""

from __future__ import annotations

from typing import Any

from deadpool_megatron.hooks.pretraining.families.family import Family, Place
from deadpool_megatron.hooks.pretraining.families.writers import abort_writers


class Megatron016(Family):
    """See :class:`Family`."""

    def globals_setter(self) -> Place:
        from megatron.training import initialize

        return Place(initialize, "set_global_variables")

    def own_config(self, argument: Any) -> Any:
        return argument

    def common_saves(self) -> tuple[Place, ...]:
        from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

        return (Place(TorchCommonSaveStrategy, "save_common"),)

    def openers(self) -> tuple[Place, ...]:
        from megatron.training import checkpointing, utils

        return Place(checkpointing, "open_file"), Place(utils, "open_file")

    def finalising(self) -> Place:
        from megatron.core.dist_checkpointing.strategies import torch

        return Place(torch, "save_state_dict_async_finalize")

    def drop_saves(self) -> None:
        from megatron.training import async_utils

        queue = async_utils._async_calls_queue
        abort_writers(queue)
        async_utils._async_calls_queue = type(queue)(persistent=queue.persistent)
