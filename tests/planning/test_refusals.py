"""Plan files that are wrong and plans that cannot hold: one line with file, key and number."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from deadpool_megatron.planning.assess import assess
from deadpool_megatron.planning.file import make_plan, read_plan
from deadpool_megatron.planning.keys import PlanError
from deadpool_megatron.planning.roles import place
from deadpool_megatron.planning.traffic import node_loads, timing
from tests.planning.plans import BASE, make

CONFIG = Path(__file__).parents[2] / "configs" / "65b.yaml"
ADVICE = re.compile(r"set (?:it|(?P<other>[a-z.]+)) to (?:at least )?(?P<value>[\w.+-]+)")
SHAPE = {"parameters": None, "layers": 8, "hidden": 64, "ffn": 256, "heads": 8, "vocab": 100}
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
CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = ("7b", "65b", "175b")
FILE_SHAPE = {"layers": 4, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 100}


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


@pytest.mark.parametrize(
    ("section", "changes", "text"),
    [
        ("parallel", {"xp": 1}, "parallel.xp: unknown key"),
        ("parallel", {"tp": "two"}, "parallel.tp: must be a whole number, got 'two'"),
        ("parallel", {"tp": 1.5}, "parallel.tp: must be a whole number, got 1.5"),
        ("parallel", {"tp": True}, "parallel.tp: must be a whole number, got True"),
        ("parallel", {"tp": [2]}, "parallel.tp: must be a whole number, got [2]"),
        ("parallel", {"tp": None}, "parallel.tp: missing"),
        ("parallel", {"dp": 0}, "parallel.dp: must be at least 1, got 0"),
        ("parallel", {"distributed_optimizer": 1}, "must be true or false, got 1"),
        ("faults", {"node_mtbf_hours": 0}, "faults.node_mtbf_hours: must be above 0"),
        ("faults", {"repair_hours": float("nan")}, "faults.repair_hours: must be a number"),
        ("faults", {"node_mtbf_hours": 1e-300}, "must be between 1e-09 and 1e+18, got 1e-300"),
        ("parallel", {"tp": 1 << 20_000}, "1e+18, got thousands of digits"),
        ("parallel", {"tp": 10**400}, "must be between 1e-09 and 1e+18, got 1000"),
        ("cluster", {"spares": 100_000_000}, "cluster.spares: must be at most 10000"),
        ("goal", {"goodput": 1}, "goal.goodput: must be at most 0.9999"),
        ("cluster", {"node_order": "random"}, "must be one of by-rack, across-racks, got random"),
        ("cluster", {"domains_file": 3}, "cluster.domains_file: must be text, got 3"),
        ("cluster", {"step_seconds": None}, "cluster.tflops_per_gpu: missing"),
        ("cluster", {"efficiency": 0.5}, "cluster.step_seconds: give it or"),
        ("cluster", {"racks": 2, "domains_file": "x"}, "cluster.racks: give it or"),
        ("cluster", {"racks": 9}, "cluster.racks: must be at most cluster.nodes (8)"),
        ("cluster", {"host_memory_reserved_gb": 500}, "must be below cluster.host_memory_gb"),
        ("model", {"parameters": None}, "model.layers: missing"),
        ("model", {"layers": 3}, "model.parameters: give it or the shape"),
        ("model", {"experts": 3}, "model.expert_parameters"),
        ("model", {"expert_parameters": 1e11}, "must be at most model.parameters"),
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected sections"),
        ("- 1", "expected sections"),
        ("model: [", "line 1: no YAML"),
        ("goal: {goodput: 0.5, goodput: 0.6}", "goodput: given twice"),
        ("goal: {}", "parallel.tp: missing"),
        ("a: 2026-13-45", "no YAML that makes sense"),
        ("x: !!int abc", "no YAML that makes sense"),
        ("[1, 2]: 3", "no YAML that makes sense"),
        ("[" * 3000, "no YAML that makes sense"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"none\.yaml: No such file"):
        read_plan(tmp_path / "none.yaml")
    with pytest.raises(PlanError, match=r"cluster\.domains_file: No such file"):
        read_plan(CONFIGS / "7b.yaml", ("cluster.racks=null", "cluster.domains_file=none"))
    nul = 'cluster.domains_file="a\\0b"'
    with pytest.raises(PlanError, match=r"cluster\.domains_file: .*embedded null byte"):
        read_plan(CONFIGS / "7b.yaml", ("cluster.racks=null", nul))


def test_overrides_replace_add_and_take_away() -> None:
    overrides = ("cluster.spares=7", "goal.goodput=0.5", "cluster.racks=null", "parallel.dp=3.2e1")
    plan = read_plan(CONFIGS / "7b.yaml", overrides)
    assert (plan.cluster.spares, plan.goal.goodput, plan.cluster.racks) == (7, 0.5, None)
    assert plan.parallel.dp == 32
    for wrong in ("spares=7", "cluster.spares", "clutser.spares=7", "="):
        with pytest.raises(PlanError, match=r"expected SECTION\.KEY=VALUE"):
            read_plan(CONFIGS / "7b.yaml", (wrong,))


def test_without_pyyaml_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(PlanError, match=r"PyYAML is missing: .*deadpool-megatron\[plan\]"):
        read_plan(CONFIGS / "7b.yaml")


def arguments(name: str) -> dict[str, str]:
    lines = (CONFIGS / "megatron-lm" / f"gpt-{name}.args").read_text().splitlines()
    return {flag.removeprefix("--"): value for flag, _, value in (x.partition(" ") for x in lines)}


@pytest.mark.parametrize("name", SIZES)
def test_the_configs_are_those_of_the_argument_files(name: str) -> None:
    plan, flags = read_plan(CONFIGS / f"{name}.yaml"), arguments(name)
    model, parallel = plan.model, plan.parallel
    assert model.layers == int(flags["num-layers"])
    assert model.hidden == int(flags["hidden-size"])
    assert model.ffn == int(flags["ffn-hidden-size"])
    assert model.heads == int(flags["num-attention-heads"])
    assert model.swiglu == ("swiglu" in flags)
    assert model.untied == ("untie-embeddings-and-output-weights" in flags)
    assert model.biases == ("disable-bias-linear" not in flags)
    assert model.rmsnorm == (flags.get("normalization") == "RMSNorm")
    learned = flags["position-embedding-type"] == "learned_absolute"
    assert model.positions == (int(flags["max-position-embeddings"]) if learned else 0)
    assert parallel.tp == int(flags["tensor-model-parallel-size"])
    assert parallel.pp == int(flags["pipeline-model-parallel-size"])
    tokens = int(flags["global-batch-size"]) * int(flags["seq-length"])
    assert plan.cluster.tokens_per_step == tokens
