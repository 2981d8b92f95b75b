"""The smallest loop that has a training state."""

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from deadpool_megatron.megatron import loop_extras as extras
from deadpool_megatron.state.extras import decode, encode


def plain_loop(chunks: list[torch.nn.Module], *inner: Any) -> Any:
    """A loop of these chunks and inner optimizers, as far as it is captured."""
    for chunk in chunks:
        chunk.config = getattr(chunk, "config", SimpleNamespace())  # type: ignore[assignment]
    return SimpleNamespace(
        model_chunks=chunks,
        optimizer=SimpleNamespace(chained_optimizers=list(inner), zero_grad=lambda: None),
        scheduler=SimpleNamespace(num_steps=0),
        counters={"iteration": 0},
        log_sums={},
        extra_state=dict,
        restore_extra_state=lambda values: None,
    )


def captured(loop: Any) -> dict[str, Any]:
    """The extras, as they come back from a slot."""
    return decode(encode(extras.capture(loop)))


def scaler(hysteresis: int) -> DynamicGradScaler:
    return DynamicGradScaler(
        initial_scale=2.0**16,
        min_scale=1.0,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2,
        hysteresis=hysteresis,
    )


def schedule(inner: Any, **changes: Any) -> Any:
    """Return Megatron's scheduler with these arguments."""
    values: dict[str, Any] = {
        "init_lr": 0.0,
        "max_lr": 1e-3,
        "min_lr": 1e-5,
        "lr_warmup_steps": 4,
        "lr_decay_steps": 100,
        "lr_decay_style": "cosine",
        "start_wd": 0.01,
        "end_wd": 0.1,
        "wd_incr_steps": 100,
        "wd_incr_style": "linear",
        "use_checkpoint_opt_param_scheduler": True,
        "override_opt_param_scheduler": False,
        "wsd_decay_steps": 10,
        "lr_wsd_decay_style": "linear",
    }
    return OptimizerParamScheduler(inner, **{**values, **changes})
