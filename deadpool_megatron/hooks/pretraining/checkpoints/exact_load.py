"""load_checkpoint() of Megatron-LM such that training goes on with the very same numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from deadpool_megatron.hooks.checkpoints.loading import exact_load


def load_exactly(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``original``, Megatron's load_checkpoint(), and have the optimizer come back exactly.

    Nothing is left to do for the rest: Megatron saves the random generators of each pipeline and
    tensor rank, and of each data-parallel rank where these differ (checkpointing.py:336).
    """
    optimizer = inspect.signature(original).bind(*args, **kwargs).arguments.get("optimizer")
    if optimizer is None:
        return original(*args, **kwargs)
    with exact_load(optimizer):
        return original(*args, **kwargs)
