"""``deadpool plan``: verdicts of the shipped plans, refusals, JSON, what-if, and its document."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.told import CarryOut

ROOT = Path(__file__).parents[3]
CONFIGS = ("configs/7b.yaml", "configs/65b.yaml", "configs/175b.yaml")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def values(carry_out: CarryOut, *arguments: str) -> dict[str, Any]:
    status, text, _ = carry_out("plan", *arguments, "--json")
    found: dict[str, Any] = json.loads(text)
    assert found["ok"] is (status != 2)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shipped_plans_hold(name: str, carry_out: CarryOut) -> None:
    status, text, errors = carry_out("plan", name)
    assert (status, errors) == (0, "")
    assert text.splitlines()[0].startswith(f"{name}: ")
    assert text.splitlines()[-1].startswith("verdict: holds: a commit takes ")
    assert "reaches the goal" in text
    assert re.search(r"^  1 node +0$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 130


SCHEMA: dict[str, Any] = {
    "ok": bool,
    "file": str,
    "plan": dict,
    "parameters": int,
    "roles": int,
    "slots": int,
    "largest_shard_bytes": int,
    "domains": int,
    "copies_in_same_domain": int,
    "nodes": {
        name: {"mean": (int, float), "largest": int}
        for name in (
            "unique_bytes", "own_slots_bytes", "copies_bytes", "out_bytes_per_step",
            "in_bytes_per_step", "memory_bytes",
        )
    },
    "timing": dict.fromkeys(
        (
            "step_seconds", "forward_backward_seconds", "window_seconds", "copy_seconds",
            "checksum_seconds", "ship_seconds", "paced_ship_seconds", "commit_seconds",
            "stall_seconds", "hidden_fraction", "cycle_seconds",
        ),
        float,
    ),
    "fetch_seconds": float,
    "most_lost_steps": int,
    "risk": {
        "loss_probability": list,
        "holder_sets": int,
        "fatal_domains": list,
        "exposure_seconds": float,
        "hours_between_node_losses": float,
        "hours_between_state_losses": float,
    },
    "goodput": {
        "available": float,
        "hot_swap_with_spare": float,
        "restart_with_spare": float,
        "spares_needed": int,
        "hot_swap": float,
        "restart": float,
    },
    "reaches_goal": bool,
    "verdict": str,
}  # fmt: skip


def check_schema(found: Any, schema: Any, place: str = "") -> None:
    if isinstance(schema, dict):
        assert found.keys() == schema.keys(), place
        for key, inner in schema.items():
            check_schema(found[key], inner, f"{place}.{key}")
    else:
        assert isinstance(found, schema), place


@pytest.mark.parametrize("name", CONFIGS)
def test_json_has_every_number(name: str, carry_out: CarryOut) -> None:
    found = values(carry_out, name)
    check_schema(found, SCHEMA)
    assert found["plan"].keys() == {
        "model", "parallel", "protection", "cluster", "faults", "goal"
    }  # fmt: skip
    assert found["risk"]["loss_probability"][0] == 0
    assert found["copies_in_same_domain"] == 0
    assert found["timing"]["hidden_fraction"] == 1


def test_what_if(carry_out: CarryOut) -> None:
    before = values(carry_out, "configs/65b.yaml")
    after = values(
        carry_out, "configs/65b.yaml", "--set", "protection.replicas=2", "--set", "cluster.spares=5"
    )
    assert after["plan"]["protection"]["replicas"] == 2
    assert after["risk"]["loss_probability"][1] == 0 < before["risk"]["loss_probability"][1]
    assert after["nodes"]["copies_bytes"]["mean"] == pytest.approx(
        2 * before["nodes"]["copies_bytes"]["mean"]
    )
    assert after["goodput"]["available"] > before["goodput"]["available"]


def test_a_goal_that_is_missed(carry_out: CarryOut) -> None:
    few = ("configs/65b.yaml", "--set", "cluster.spares=0")
    status, text, _ = carry_out("plan", *few)
    assert status == 1
    spares = re.search(r"verdict: holds.*; but goodput .*: set cluster.spares to (\d+)$", text)
    assert spares is not None
    assert carry_out("plan", *few, "--set", f"cluster.spares={spares[1]}")[0] == 0
    status, text, _ = carry_out("plan", *few, "--set", "goal.goodput=0.9999")
    assert status == 1
    reachable = re.search(r"which no number of spares reaches.* to at most (0\.\d+)$", text)
    assert reachable is not None
    enough = (f"goal.goodput={reachable[1]}", "cluster.spares=20")
    assert carry_out("plan", few[0], "--set", enough[0], "--set", enough[1])[0] == 0


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("cluster.host_memory_gb=320", "cluster.host_memory_gb: node"),
        ("parallel.tp=two", "parallel.tp: must be a whole number"),
    ],
)
def test_refusals(override: str, line: str, carry_out: CarryOut) -> None:
    status, text, errors = carry_out("plan", "configs/65b.yaml", "--set", override)
    assert (status, text) == (2, "")
    assert errors.startswith(f"deadpool plan: configs/65b.yaml: {line}")
    assert errors.count("\n") == 1
    status, text, errors = carry_out("plan", "configs/65b.yaml", "--set", override, "--json")
    assert (status, errors.count("\n")) == (2, 1)
    assert json.loads(text) == {"ok": False, "error": errors.removeprefix("deadpool plan: ")[:-1]}


def test_the_worked_example_of_the_document_is_what_the_command_prints(carry_out: CarryOut) -> None:
    blocks = re.findall(
        r"^```\n\$ deadpool plan (.*)\n((?:.*\n)*?)```$",
        (ROOT / "docs" / "planning.md").read_text(),
        re.MULTILINE,
    )
    assert any(arguments == "configs/65b.yaml" for arguments, _ in blocks)
    for arguments, shown in blocks:
        _, text, errors = carry_out("plan", *arguments.split())
        assert shown == text + errors, arguments


def test_the_schemes_side_by_side(carry_out: CarryOut) -> None:
    status, text, _ = carry_out("plan", "configs/65b.yaml", "--compare")
    assert status == 0
    assert max(map(len, text.splitlines())) <= 110
    document = (ROOT / "docs/planning.md").read_text()
    assert text.strip() in document
    schemes = values(carry_out, "configs/65b.yaml", "--compare")["schemes"]
    assert [known["ok"] for known in schemes] == [True] * 5


def test_no_scheme_holds(carry_out: CarryOut) -> None:
    few = ("--set", "cluster.host_memory_gb=301")
    status, text, errors = carry_out("plan", "configs/65b.yaml", "--compare", *few)
    assert (status, text) == (2, "")
    assert "no scheme can hold; buddy: cluster.host_memory_gb" in errors


def test_other_schemes_are_named(carry_out: CarryOut) -> None:
    wish = ("--set", "protection.scheme=parity", "--set", "protection.cadence=3")
    _, text, _ = carry_out("plan", "configs/65b.yaml", *wish)
    assert "parity(4) for 1, every 3 steps" in text
    assert "parity blocks over groups of up to 4 roles" in text
    assert "RPO: at most 5 steps" in text
