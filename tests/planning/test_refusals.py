"""Plans that cannot hold: one line with the number to change, and with that number it holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deadpool_megatron.planning.assess import assess
from deadpool_megatron.planning.file import read_plan
from deadpool_megatron.planning.keys import PlanError
from deadpool_megatron.planning.roles import place
from deadpool_megatron.planning.traffic import node_loads, timing
from tests.planning.plans import make

CONFIG = Path(__file__).parents[2] / "configs" / "65b.yaml"
ADVICE = re.compile(r"set (?:it|(?P<other>[a-z.]+)) to (?:at least )?(?P<value>[\w.+-]+)")
SHAPE = {"parameters": None, "layers": 8, "hidden": 64, "ffn": 256, "heads": 8, "vocab": 100}


def refusal(**sections: dict[str, Any]) -> str:
    with pytest.raises(PlanError) as caught:
        assess(make(**sections))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sections", "key", "value"),
    [
        ({"cluster": {"nodes": 7}}, "cluster.nodes", "8"),
        ({"parallel": {"dp": 3}, "cluster": {"gpus_per_node": 8}}, "parallel.dp", "4"),
        ({"model": SHAPE, "parallel": {"pp": 3}}, "parallel.pp", "2"),
        ({"model": SHAPE, "parallel": {"tp": 3}}, "parallel.tp", "2"),
        ({"model": {**SHAPE, "heads": 7}}, "model.heads", "4"),
        ({"model": {**SHAPE, "kv_heads": 3}}, "model.kv_heads", "2"),
        ({"model": {**SHAPE, "ffn": 255}}, "parallel.tp", "1"),
        ({"model": {**SHAPE, "experts": 6}, "parallel": {"ep": 4}}, "parallel.ep", "3"),
        ({"model": {"expert_parameters": 10}, "parallel": {"ep": 3}}, "parallel.ep", "2"),
        ({"parallel": {"ep": 2}}, "parallel.ep", "1"),
        ({"parallel": {"optimizer_instances": 3}}, "parallel.optimizer_instances", "2"),
        (
            {"parallel": {"optimizer_instances": 2, "distributed_optimizer": False}},
            "parallel.optimizer_instances",
            "1",
        ),
        ({"protection": {"replicas": 9}}, "protection.replicas", "8"),
        (
            {"protection": {"replicas": 2}, "cluster": {"racks": 2}},
            "protection.replicas",
            "1",
        ),
        ({"cluster": {"racks": 1}}, "cluster.racks", "2"),
        (
            {
                "parallel": {"tp": 1, "pp": 1, "dp": 2},
                "cluster": {"nodes": 1, "spares": 0, "host_memory_gb": 2000, "nic_gb_s": 100},
            },
            "cluster.spares",
            "1",
        ),
        ({"cluster": {"host_memory_gb": 50}}, "cluster.host_memory_gb", "60.1"),
        ({"faults": {"swap_seconds": 1}}, "faults.swap_seconds", "1.88"),
    ],
)
def test_what_does_not_hold_is_named_with_a_number(
    sections: dict[str, Any], key: str, value: str
) -> None:
    line = refusal(**sections)
    assert line.startswith(f"{key}: ")
    assert re.search(rf"(set it to|above)( at least)? {re.escape(value)}\b", line), line


def test_experts_have_to_fill_their_tensor_ranks() -> None:
    line = refusal(model={"expert_parameters": 10}, parallel={"etp": 3})
    assert line == "parallel.ep: tp x cp x dp (8) is no multiple of 3: make tp x cp x dp one"


def test_racks_of_which_there_cannot_be_enough_are_to_be_left_out() -> None:
    few = {"nodes": 1, "spares": 1, "host_memory_gb": 5000}
    whole = {"parallel": {"tp": 1, "pp": 1, "dp": 2}, "faults": {"swap_seconds": 1e6}}
    line = refusal(cluster={**few, "racks": 1}, **whole)
    assert line.startswith("cluster.racks: ")
    assert "take it away" in line
    assess(make(cluster={**few, "nic_gb_s": 100}, **whole))


def test_a_domains_file_that_cannot_be_read_or_is_too_coarse(tmp_path: Path) -> None:
    path = tmp_path / "65b.yaml"
    path.write_text(CONFIG.read_text())
    overrides = ("cluster.racks=null", "cluster.domains_file=racks")
    (tmp_path / "racks").write_text("0 a b c\n")
    with pytest.raises(PlanError, match="domains file, line 1"):
        assess(read_plan(path, overrides))
    (tmp_path / "racks").write_text("".join(f"{node} room\n" for node in range(66)))
    with pytest.raises(PlanError, match=r"^cluster\.domains_file: .* to at least 2 of them"):
        assess(read_plan(path, overrides))
    (tmp_path / "racks").write_text("".join(f"gpu{node} rack{node % 8}\n" for node in range(66)))
    with pytest.raises(PlanError, match=r"^cluster\.domains_file: .* gpu0 is one: .*, 0 to 65$"):
        assess(read_plan(path, overrides))
    (tmp_path / "racks").write_text("".join(f"{node} rack{node % 8}\n" for node in range(66)))
    assert assess(read_plan(path, overrides)).placement.same_domain == 0


WINDOWS = st.fixed_dictionaries(
    {
        "nic_gb_s": st.floats(0.05, 20),
        "pcie_gb_s": st.floats(0.05, 20),
        "checksum_gb_s": st.floats(0.05, 20),
        "step_seconds": st.floats(0.5, 60),
        "forward_backward_fraction": st.floats(0.3, 1),
        "host_memory_gb": st.sampled_from([100, 5000]),
        "racks": st.sampled_from([None, 2, 4]),
    }
)


@given(
    cluster=WINDOWS,
    lag=st.integers(0, 2),
    cadence=st.integers(1, 4),
    scheme=st.sampled_from(["buddy", "local", "local-twice"]),
)
def test_the_advice_for_a_window_is_enough_and_no_more(
    cluster: dict[str, Any], lag: int, cadence: int, scheme: str
) -> None:
    protection = {"max_lag": lag, "cadence": cadence, "scheme": scheme}
    sections = {"cluster": cluster, "protection": protection, "faults": {"swap_seconds": 1e6}}
    try:
        assess(make(**sections))
        return
    except PlanError as error:
        line = str(error)
    assume("window" in line)
    key, value = line.partition(":")[0], ADVICE.search(line)
    assert value is not None
    section, name = key.split(".")

    def stall(number: float) -> float:
        changed = {**sections, section: {**sections[section], name: number}}
        plan = make(**changed)
        placement = place(plan)
        loads = node_loads(plan, placement)
        return timing(plan, placement, loads, plan.cluster.step_seconds or 0).stall_seconds

    advised = float(value["value"])
    assert stall(advised) <= 1e-9
    if section == "cluster":
        assert stall(advised * 0.98) > 0, "less would have been enough"


def test_memory_is_enough_with_the_number_that_was_named() -> None:
    line = refusal(cluster={"host_memory_gb": 50, "host_memory_reserved_gb": 20})
    found = ADVICE.search(line)
    assert found is not None
    assess(make(cluster={"host_memory_gb": found["value"], "host_memory_reserved_gb": 20}))


@pytest.mark.parametrize("order", ["by-rack", "across-racks"])
def test_the_order_of_nodes_in_racks_costs_nothing(order: str) -> None:
    """Buddies are far enough round the group for neighbours in a rack to find different ones."""
    tight = {"racks": 2, "nic_gb_s": 1, "node_order": order}
    assess(make(cluster=tight))


def test_a_derived_step_is_made_longer_by_tokens() -> None:
    speed = {"tflops_per_gpu": 1000, "efficiency": 0.5, "tokens_per_step": 1000}
    slow = {"step_seconds": None, "nic_gb_s": 10, "checksum_gb_s": 1e-3, **speed}
    line = refusal(cluster=slow)
    assert line.startswith("cluster.tokens_per_step: a commit takes")
    found = ADVICE.search(line)
    assert found is not None
    assess(make(cluster={**slow, "tokens_per_step": found["value"]}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"protection": {"replicas": 10**12}}, "protection.replicas: 1000000000000 copies"),
        ({"parallel": {"tp": 10**12}}, "parallel.tp: must be at most 1000000"),
        ({"model": {**SHAPE, "kv_heads": 10**12}}, "model.kv_heads: must be at most 1000000"),
        (
            {"parallel": {"dp": 10**6}, "cluster": {"nodes": 2 * 10**6}},
            "parallel.dp: 4000000 roles are more than 1000000: set it lower",
        ),
    ],
)
def test_a_slip_of_many_zeros_is_refused_at_once(sections: dict[str, Any], said: str) -> None:
    assert refusal(**sections).startswith(said)
