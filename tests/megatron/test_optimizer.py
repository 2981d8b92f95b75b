"""Norms and state by which a role is judged."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deadpool_megatron.megatron.optimizer import install_step_hooks
from deadpool_megatron.member.framework import StepCalls
from deadpool_megatron.state.parts import Part, largest_value


@pytest.mark.parametrize(
    ("answer", "groups", "judged"),
    [
        (
            (True, torch.tensor([2.0]), None),
            {"mtp": 4.0},
            [2.0, 4.0],
        ),  # parameters that the first leaves out
        ((False, math.inf, None), {}, []),  # skipped: how loss scaling looks for its scale
        ((True, None, None), {}, []),  # a role without parameters
        (None, {}, []),  # of a loop of one's own
    ],
)
def test_every_norm_of_an_applied_update_is_judged(answer, groups, judged):
    optimizer: Any = SimpleNamespace(
        step=lambda: answer, grad_norms_by_group=groups, chained_optimizers=[]
    )
    order = list[Any]()
    install_step_hooks(optimizer, StepCalls(lambda: order.append("gate"), [], [], order.append))
    assert optimizer.step() is answer
    assert order == ["gate", *judged]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_one_number_of_a_state_that_is_not_finite_is_found(value):
    last = torch.zeros(3, 2, dtype=torch.bfloat16)
    others = [torch.empty(0), torch.tensor([2**30]), torch.tensor([-7.0])]
    parts = [Part("shard0", others, [0]), Part("shard1", [last], [0])]
    assert (largest_value(parts), largest_value([])) == (7.0, 0.0)
    last[2, 1] = value
    assert not math.isfinite(largest_value(parts))
