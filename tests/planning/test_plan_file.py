"""Plan files that are wrong: one line with file and key."""

from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.planning.plan_file import PlanError, make_plan, read_plan
from tests.planning.plans import BASE, make

CONFIGS = Path(__file__).parents[2] / "configs"
FILE_SHAPE = {"layers": 4, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 100}


@pytest.mark.parametrize(
    ("section", "changes", "text"),
    [
        ("parallel", {"xp": 1}, "parallel.xp: unknown key"),
        ("parallel", {"tp": "two"}, "parallel.tp: must be a whole number, got 'two'"),
        ("parallel", {"tp": True}, "parallel.tp: must be a whole number, got True"),
        ("parallel", {"tp": None}, "parallel.tp: missing"),
        ("parallel", {"dp": 0}, "parallel.dp: must be at least 1, got 0"),
        ("parallel", {"tp": 10**12}, "parallel.tp: must be at most 1e+06"),
        ("parallel", {"distributed_optimizer": 1}, "must be true or false, got 1"),
        ("cluster", {"pcie_gb_s": 0}, "cluster.pcie_gb_s: must be above 0"),
        ("cluster", {"pcie_gb_s": float("nan")}, "cluster.pcie_gb_s: must be a number"),
        ("protection", {"scheme": "none"}, "must be one of buddy, parity, local"),
        ("cluster", {"step_seconds": None}, "cluster.tflops_per_gpu: missing"),
        ("cluster", {"racks": 9}, "cluster.racks: must be at most cluster.nodes (8)"),
        ("cluster", {"host_memory_reserved_gb": 500}, "must be below cluster.host_memory_gb"),
        ("model", {"parameters": None}, "model.layers: missing"),
        ("model", {"layers": 3}, "model.parameters: give it or the shape"),
        ("model", {"parameters": None, **FILE_SHAPE, "expert_parameters": 1}, "only together with"),
        ("model", {"parameters": None, **FILE_SHAPE, "experts": 2, "experts_per_token": 3}, "(2)"),
    ],
)
def test_wrong_values_are_named(section: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        make(**{section: changes})
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_step_of_experts_without_a_shape_is_not_guessed() -> None:
    """Taken for dense, a model of which a token goes through a tenth has ten times the window."""
    speed = {"step_seconds": None, "tflops_per_gpu": 989, "efficiency": 0.4, "tokens_per_step": 1e6}
    with pytest.raises(PlanError, match=r"^cluster\.step_seconds: missing; model\.expert_param"):
        make(model={"expert_parameters": 9 * 10**9}, cluster=speed)
    make(cluster=speed)


def test_sections_are_checked() -> None:
    with pytest.raises(PlanError, match=r"^modle: unknown section, there are model, parallel"):
        make_plan({**BASE, "modle": {}})
    with pytest.raises(PlanError, match=r"^model: expected keys with values, got 3"):
        make_plan({**BASE, "model": 3})


def test_overrides_replace_add_and_take_away() -> None:
    overrides = (
        "cluster.spares=7",
        "protection.cadence=5",
        "cluster.racks=null",
        "parallel.dp=3.2e1",
    )
    plan = read_plan(CONFIGS / "7b.yaml", overrides)
    assert (plan.cluster.spares, plan.protection.cadence, plan.cluster.racks) == (7, 5, None)
    assert plan.parallel.dp == 32
    for wrong in ("spares=7", "cluster.spares", "clutser.spares=7", "="):
        with pytest.raises(PlanError, match=r"expected SECTION\.KEY=VALUE"):
            read_plan(CONFIGS / "7b.yaml", (wrong,))
