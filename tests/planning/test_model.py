"""Parameters against the published sizes, and against Megatron's own way to split them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.planning.file import read_plan
from deadpool_megatron.planning.keys import Model
from deadpool_megatron.planning.model import (
    active_parameters,
    stage_parameters,
    step_seconds,
    total_parameters,
)
from tests.planning.plans import make

CONFIGS = Path(__file__).parents[2] / "configs"
SHAPE = {"parameters": None, "layers": 4, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 1024}


@pytest.mark.parametrize(("name", "billions"), [("7b", 6.74), ("65b", 65.2), ("175b", 175.0)])
def test_known_models_have_their_known_size(name: str, billions: float) -> None:
    plan = read_plan(CONFIGS / f"{name}.yaml")
    assert total_parameters(plan.model) / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_tiny_model_counted_by_hand() -> None:
    model = Model(layers=1, hidden=4, ffn=8, heads=2, vocab=10, positions=3)
    attention = (3 * 4 * 4 + 3 * 4) + (4 * 4 + 4)
    mlp = (4 * 8 + 8) + (8 * 4 + 4)
    assert total_parameters(model) == attention + mlp + 2 * 8 + (10 + 3) * 4 + 8
    gated = Model(
        layers=1, hidden=4, ffn=8, heads=2, kv_heads=1, vocab=10,
        swiglu=True, untied=True, biases=False, rmsnorm=True,
    )  # fmt: skip
    assert total_parameters(gated) == (16 + 2 * 8 + 16) + 3 * 32 + 2 * 4 + 2 * 40 + 4


def test_only_the_experts_of_a_token_are_active() -> None:
    plan = make(model={**SHAPE, "experts": 8, "experts_per_token": 2, "biases": False})
    idle = total_parameters(plan.model) - active_parameters(plan.model)
    assert idle == 4 * 6 * (2 * 64 * 256)


@pytest.mark.parametrize("untied", [False, True])
@given(
    tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), experts=st.sampled_from([0, 4])
)
def test_the_stages_are_the_whole_model(untied: bool, tp: int, pp: int, experts: int) -> None:
    """Without vectors that tensor ranks repeat: the rest is shared out, nothing is left."""
    shape = {**SHAPE, "biases": False, "untied": untied, "experts": experts}
    plan = make(model=shape, parallel={"tp": tp, "pp": pp, "dp": 16 // tp // pp})
    stages = stage_parameters(plan.model, plan.parallel)
    split = tp * sum(stage.dense + stage.expert for stage in stages)
    repeated = (tp - 1) * (4 * (2 * 2 * 64 + 64 * experts) + 2 * 64)
    both_ends = 1024 * 64 if pp > 1 and not untied else 0
    assert split == total_parameters(plan.model) + repeated + both_ends


def test_a_given_number_of_parameters_is_shared_out_evenly() -> None:
    plan = make(model={"parameters": 1600, "expert_parameters": 800}, parallel={"ep": 4})
    assert total_parameters(plan.model) == active_parameters(plan.model) == 1600
    for stage in stage_parameters(plan.model, plan.parallel):
        assert (stage.dense, stage.expert) == (800 / 4, 800 / 16)


def test_the_step_follows_from_the_work() -> None:
    assert step_seconds(make()) == 20
    speed = {"tflops_per_gpu": 100, "efficiency": 0.5, "tokens_per_step": 10**6}
    plan = make(cluster={"step_seconds": None, **speed})
    assert step_seconds(plan) == pytest.approx(6 * 1e10 * 1e6 / (16 * 100e12 * 0.5))
