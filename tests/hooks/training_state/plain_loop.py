"""The least that has a training state."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def plain_loop(chunk: torch.nn.Module) -> Any:
    """A loop of one model chunk, without an optimizer."""
    return SimpleNamespace(
        model_chunks=[chunk],
        optimizer=SimpleNamespace(chained_optimizers=[]),
        scheduler=SimpleNamespace(num_steps=0),
        counters={"iteration": 0},
        log_sums={},
        extra_state=dict,
        restore_extra_state=lambda values: None,
    )
