"""Megatron-LM 0.18: the script parses its arguments, and hands pretrain() a config made of them."""

from __future__ import annotations

import copy
from typing import Any

from deadpool_megatron.hooks.pretraining.families.family import Place
from deadpool_megatron.hooks.pretraining.families.v017 import Megatron017


class Megatron018(Megatron017):
    """See :class:`Family`."""

    def globals_setter(self) -> Place:
        from megatron.training import arguments

        return Place(arguments, "set_global_variables")

    def own_config(self, argument: Any) -> Any:
        from megatron.training.config.container import PretrainConfigContainer

        # train() refuses a config in which it finds its own functions.
        return (
            copy.deepcopy(argument) if isinstance(argument, PretrainConfigContainer) else argument
        )

    def openers(self) -> tuple[Place, ...]:
        from megatron.training import checkpointing
        from megatron.training.utils import log_utils

        return Place(checkpointing, "open_file"), Place(log_utils, "open")
