"""What a load at the start has taken from the checkpoint reaches a process that loads nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deadpool_megatron.hooks.training_state import extras
from tests.hooks.training_state.plain_loop import captured, plain_loop, schedule

STYLES = ["linear", "cosine", "inverse-square-root", "WSD"]


def made(beta: float = 0.95, **changes: Any) -> Any:
    """A loop as its arguments say."""
    chunk = torch.nn.Linear(2, 2, bias=False)
    adam = torch.optim.AdamW(chunk.parameters(), betas=(0.9, beta))
    inner = SimpleNamespace(optimizer=adam, param_groups=adam.param_groups)
    loop = plain_loop([chunk], inner)
    loop.scheduler = schedule(inner, **changes)
    return loop


def put_over(loop: Any, spare: Any) -> None:
    extras.restore(spare, captured(loop))


@pytest.mark.parametrize("style", STYLES)
def test_a_spare_goes_on_with_the_schedule_of_the_checkpoint(style: str) -> None:
    """--use-checkpoint-opt-param-scheduler with another schedule on the command line."""
    saved = made(lr_decay_style=style, lr_decay_steps=40, lr_warmup_steps=8, end_wd=0.2)
    saved.scheduler.step(10)
    survivor, spare = made(), made()
    survivor.scheduler.load_state_dict(saved.scheduler.state_dict())
    put_over(survivor, spare)
    by_arguments = made(use_checkpoint_opt_param_scheduler=False, end_wd=0.3)
    put_over(survivor, by_arguments)
    assert by_arguments.scheduler.end_wd == 0.3
    for _ in range(20):
        for loop in (survivor, spare):
            loop.scheduler.step(1)
        (wanted,), (found,) = (
            loop.optimizer.chained_optimizers[0].param_groups for loop in (survivor, spare)
        )
        assert (found["lr"], found["weight_decay"]) == (wanted["lr"], wanted["weight_decay"])


def test_a_spare_goes_on_with_the_betas_of_the_checkpoint() -> None:
    """Megatron's load takes whole parameter groups, whatever the command line says."""
    survivor, spare = made(), made()
    saved, loaded = (one.optimizer.chained_optimizers[0].optimizer for one in (made(0.5), survivor))
    loaded.load_state_dict(saved.state_dict())
    put_over(survivor, spare)
    assert spare.optimizer.chained_optimizers[0].param_groups[0]["betas"] == (0.9, 0.5)
