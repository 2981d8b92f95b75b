"""``deadpool plan``: the shipped plans hold, refusals, JSON, what-if, and its document."""

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
    assert text.splitlines()[-1].startswith("verdict: holds")
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("name", CONFIGS)
def test_json_has_every_number(name: str, carry_out: CarryOut) -> None:
    found = values(carry_out, name)
    assert found.keys() == {
        "ok", "file", "plan", "parameters", "roles", "slots", "largest_shard_bytes", "domains",
        "nodes", "timing", "most_lost_steps", "verdict",
    }  # fmt: skip
    assert found["plan"].keys() == {"model", "parallel", "protection", "cluster"}
    assert all(entry.keys() == {"mean", "largest"} for entry in found["nodes"].values())
    assert found["timing"]["stall_seconds"] == 0


def test_what_if(carry_out: CarryOut) -> None:
    before = values(carry_out, "configs/65b.yaml")
    after = values(carry_out, "configs/65b.yaml", "--set", "protection.replicas=2")
    assert after["plan"]["protection"]["replicas"] == 2
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
