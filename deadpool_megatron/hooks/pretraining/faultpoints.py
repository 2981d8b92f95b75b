"""Where tests make a process fail within Megatron-LM's own code; nothing without a fault plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.hooks.capture.optimizer import inner_optimizers


def in_optimizer(optimizer: Any) -> None:
    """Points ``optimizer.inside`` and ``optimizer.updated``, before and after each inner update."""
    if not failpoints.ACTIVE:
        return
    for number, inner in enumerate(inner_optimizers(optimizer)):
        before = functools.partial(_hit, "optimizer.inside", number)
        after = functools.partial(_hit, "optimizer.updated", number)
        inner.optimizer.register_step_pre_hook(before)
        inner.optimizer.register_step_post_hook(after)


def in_forward(forward_step: Callable[..., Any]) -> Callable[..., Any]:
    """``forward_step`` with point ``forward`` before each micro-batch, which a fault may mark for
    gradients that are NaN; added only once."""
    if not failpoints.ACTIVE or hasattr(forward_step, "__wrapped__"):
        return forward_step

    @functools.wraps(forward_step)
    def wrapper(iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        failpoints.perhaps_spoiled(model.parameters(), "forward")
        return forward_step(iterator, model, *args, **kwargs)

    return wrapper


def _hit(point: str, number: int, *_unused: object) -> None:
    failpoints.hit(point, optimizer=number)
