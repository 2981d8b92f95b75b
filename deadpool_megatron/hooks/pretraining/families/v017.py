"""Megatron-LM 0.17: the first asynchronous save makes the queue; saving is made of functions."""

from __future__ import annotations

from typing import Any

from deadpool_megatron.hooks.pretraining.families.family import Family, Place
from deadpool_megatron.hooks.pretraining.families.writers import abort_writers


class Megatron017(Family):
    """See :class:`Family`."""

    def globals_setter(self) -> Place:
        from megatron.training import initialize

        return Place(initialize, "set_global_variables")

    def own_config(self, argument: Any) -> Any:
        return argument

    def common_saves(self) -> tuple[Place, ...]:
        from megatron.core.dist_checkpointing import serialization

        return (Place(serialization, "save_common"),)

    def openers(self) -> tuple[Place, ...]:
        from megatron.training import checkpointing, utils

        return Place(checkpointing, "open_file"), Place(utils, "open_file")

    def finalising(self) -> Place:
        # Each save imports it anew (strategies/torch.py, _import_mcore_async).
        from megatron.core.dist_checkpointing.strategies import state_dict_saver

        return Place(state_dict_saver, "save_state_dict_async_finalize")

    def drop_saves(self) -> None:
        from megatron.training import async_utils

        if async_utils._async_calls_queue is not None:
            abort_writers(async_utils._async_calls_queue)
        async_utils._async_calls_queue = None
