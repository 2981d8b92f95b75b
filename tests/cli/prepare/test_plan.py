"""``deadpool plan``: the shipped plans hold, refusals, JSON, what-if, and its document."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cli.prepare import plan as plan_command
from deadpool_megatron.planning.assessment import SWAP_SECONDS
from tests.cli.told import CarryOut

ROOT = Path(__file__).parents[3]
CONFIGS = ("configs/7b.yaml", "configs/65b.yaml", "configs/175b.yaml")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def values(carry_out: CarryOut, *arguments: str) -> dict[str, Any]:
    status, text, _ = carry_out("plan", *arguments, "--json")
    found: dict[str, Any] = json.loads(text)
    assert found["ok"] is (status != 2)
    return found


def test_plan_refuses_a_batch_that_megatron_refuses(carry_out):
    given = ("plan", "--args", "configs/megatron-lm/gpt-7b.args", "--nodes")
    assert carry_out(*given, "4")[0] == 0
    status, _, errors = carry_out(*given, "3")
    assert (status, len(errors.splitlines())) == (2, 1)
    assert "--global-batch-size (2048) is no multiple of 12" in errors


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shipped_plans_hold(name, carry_out):
    status, text, errors = carry_out("plan", name)
    assert (status, errors) == (0, "")
    assert text.splitlines()[0].startswith(f"{name}: ")
    assert "\nverdict: holds" in text
    assert "\nIn 30 days, in GPU-hours: hot swap" in text
    assert max(map(len, text.splitlines())) <= 100
    found = values(carry_out, name)
    assert found.keys() == {
        "ok", "file", "plan", "parameters", "roles", "slots", "largest_shard_bytes", "domains",
        "nodes", "timing", "most_lost_steps", "verdict", "overhead_share", "swap_seconds",
        "training_shares",
    }  # fmt: skip
    assert found["plan"].keys() == {"model", "parallel", "protection", "cluster"}
    assert all(entry.keys() == {"mean", "largest"} for entry in found["nodes"].values())
    assert found["timing"]["stall_seconds"] == 0


@pytest.mark.parametrize(("model", "nodes"), [("7b", 8), ("65b", 64), ("175b", 128)])
def test_plan_from_arguments_equals_the_shipped_plan(model, nodes, carry_out):
    plan = f"configs/{model}.yaml"
    arguments = ("--args", f"configs/megatron-lm/gpt-{model}.args", "--nodes", str(nodes))
    found, shipped = values(carry_out, *arguments), values(carry_out, plan)
    assert not shipped["training_shares"], "a plan without a batch knows one size only"
    if model == "65b":
        assert found["training_shares"][0] == pytest.approx([0.736, 0.967], abs=5e-4)
    for key in ("parameters", "roles", "slots", "largest_shard_bytes"):
        assert found[key] == shipped[key]
    assert found["timing"]["step_seconds"] == shipped["timing"]["step_seconds"]
    assert found["plan"]["parallel"] == shipped["plan"]["parallel"]
    assert values(carry_out, plan, *arguments)["plan"]["cluster"] == shipped["plan"]["cluster"]
    _, text, _ = carry_out("plan", *arguments)
    assert "nic_gb_s 12.5" in text.splitlines()[-1], "what is assumed is named"


def test_plan_reads_experts_and_names_missing_arguments(tmp_path, carry_out):
    file, more = (
        tmp_path / "moe.args",
        ("--set", "model.vocab=1000", "--set", "cluster.efficiency=1e-5"),
    )
    file.write_text(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --swiglu --seq-length 8"
        " --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 --num-query-groups 2"
        " --global-batch-size 512"
    )
    status, _, error = carry_out("plan", "--args", file, "--nodes", 1)
    assert (status, "model.vocab: missing" in error) == (2, True)
    found = values(carry_out, "--args", str(file), "--nodes", "4", *more)["plan"]
    assert (found["model"]["ffn"], found["model"]["kv_heads"]) == (128, 2)
    assert (found["parallel"]["ep"], found["parallel"]["dp"]) == (4, 32)


def test_plan_takes_measurements_from_a_run(carry_out, monkeypatch):
    failures = [SimpleNamespace(seconds=each, planned=each == 9) for each in (4.0, 5.0, 9.0, None)]
    steps = [20.0, 40.0, 30.0]
    story = SimpleNamespace(step_seconds=lambda: steps, failures=failures)
    monkeypatch.setattr(plan_command, "read_story", lambda _: story)
    assert values(carry_out, CONFIGS[1])["swap_seconds"] == SWAP_SECONDS
    found = values(carry_out, CONFIGS[1], "--run", "runs/x")
    assert (found["timing"]["step_seconds"], found["swap_seconds"]) == (30.0, 4.5)
    steps.clear()
    assert carry_out("plan", CONFIGS[1], "--run", "runs/x")[0] == 2


def test_plan_takes_overrides(carry_out):
    before = values(carry_out, "configs/65b.yaml")
    after = values(carry_out, "configs/65b.yaml", "--set", "protection.copies=2")
    assert after["plan"]["protection"]["copies"] == 2
    assert after["nodes"]["copies_bytes"]["mean"] == pytest.approx(
        2 * before["nodes"]["copies_bytes"]["mean"]
    )


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("cluster.host_memory_gb=320", "cluster.host_memory_gb: node"),
        ("parallel.tp=two", "parallel.tp: must be a whole number"),
    ],
)
def test_refusals(override, line, carry_out):
    status, text, errors = carry_out("plan", "configs/65b.yaml", "--set", override, "--json")
    assert (status, errors.count("\n")) == (2, 1)
    assert errors.startswith(f"deadpool plan: configs/65b.yaml: {line}")
    assert json.loads(text) == {"ok": False, "error": errors.removeprefix("deadpool plan: ")[:-1]}


def test_readme_has_the_computed_cost_of_each_plan(carry_out):
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(configs/\S+)` \|(.*)\|$", readme, re.MULTILINE)
    assert len(rows) == 3
    for file, row in rows:
        _, text, _ = carry_out("plan", file, "--json")
        found = json.loads(text)
        cluster, nodes, timing = found["plan"]["cluster"], found["nodes"], found["timing"]
        spares = f"{cluster['spares']} spare{'s' if cluster['spares'] > 1 else ''}"
        memory, sent = (
            f"{nodes[name]['largest'] / 1e9:.1f} GB"
            for name in ("memory_bytes", "out_bytes_per_step")
        )
        seconds = f"{timing['commit_seconds']:.1f} of {timing['window_seconds']:.1f} s"
        cells = [f"{cluster['nodes']} and {spares}", memory, sent, seconds]
        assert [cell.strip() for cell in row.split("|")] == cells, file


def test_plan_prints_the_example_of_the_page(carry_out):
    blocks = re.findall(
        r"^```\n\$ deadpool plan (.*)\n((?:.*\n)*?)```$",
        (ROOT / "docs" / "planning.md").read_text(),
        re.MULTILINE,
    )
    assert any(arguments == "configs/65b.yaml" for arguments, _ in blocks)
    for arguments, shown in blocks:
        _, text, errors = carry_out("plan", *arguments.split())
        assert shown == text + errors, arguments
