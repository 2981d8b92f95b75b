"""Megatron-LM 0.19: models are built from the config, and checkpoints have no common file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deadpool_megatron.hooks.pretraining.families.family import Place
from deadpool_megatron.hooks.pretraining.families.v018 import Megatron018


class Megatron019(Megatron018):
    """See :class:`Family`."""

    def set_up_around(self, set_up: Callable[..., Any], model: Any) -> Any:
        # Without a model in the config it asks get_model().
        return super().set_up_around(
            lambda: set_up(cfg_container=None, model_provider_func=_never), model
        )

    def common_saves(self) -> tuple[Place, ...]:
        return ()

    def openers(self) -> tuple[Place, ...]:
        from megatron.training import checkpointing
        from megatron.training.utils import log_utils

        return Place(checkpointing.maybe_msc, "open"), Place(log_utils, "open")


def _never(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("the model is there already")
