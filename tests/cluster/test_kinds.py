"""Whole runs of the counting member: each kind of failure is noticed, named and acted upon."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.events import Kind
from tests.cluster.running import Run, deadpool, send

pytestmark = pytest.mark.slow


def poison(name: str, iteration: int) -> dict[str, Any]:
    """Role 0 reports a loss that is not a number, once."""
    match = {"iteration": iteration}
    return {"id": name, "point": "member.loss", "match": match, "action": "mark"}


def kinds_of(final: dict[str, Any]) -> list[str]:
    return [recovery["kind"] for recovery in final["recoveries"]]


def test_stopped_node_is_frozen_and_killed_one_is_lost(tmp_path: Path) -> None:
    with Run(tmp_path / "r", spares=2) as run:
        run.wait_iteration(3)
        send(run.listing(1)["agent"], signal.SIGSTOP)
        assert run.wait_event(Kind.NODE_LOST).data["kind"] == "node-frozen"
        run.wait_event(Kind.RECOVERED)
        send(run.listing(1)["agent"], signal.SIGCONT)
        send(run.listing(0)["agent"])
        assert run.wait_event(Kind.NODE_LOST, 2).data["kind"] == "node-lost"
        run.wait_event(Kind.RECOVERED, 2)
        shown = deadpool("status", str(run.run.path)).stdout
        final = run.finish()
    assert kinds_of(final) == ["node-frozen", "node-lost"]
    assert "a node was frozen" in shown
    report = deadpool("report", str(run.run.path)).stdout
    assert "a node was frozen" in report
    assert "a node was lost" in report


def test_nan_stops_with_status_4_and_what_is_known(tmp_path: Path) -> None:
    with Run(tmp_path / "r", "--save-interval", "4", faults=[poison("nan", 6)]) as run:
        final = run.wait_end(4)
    assert final["kind"] == "nonfinite-loss"
    assert "the loss of iteration 6 is nan (role 0, node 0)" in final["reason"]
    assert "iteration-4 (iteration 4)" in final["reason"]


def test_nan_is_rolled_back_and_the_iteration_computed_anew(tmp_path: Path) -> None:
    options = ("--deadpool-nonfinite", "rollback")
    with Run(
        tmp_path / "r", "--iterations", "12", options=options, faults=[poison("nan", 6)]
    ) as run:
        final = run.check_result(12)
    assert kinds_of(final) == ["nonfinite-loss"]
    assert final["recoveries"][0]["generation"][1] == 5
    assert final["steps"][5]["loss"] != "nan"
    assert "the loss was not finite" in deadpool("report", str(run.run.path)).stdout


def test_nan_twice_at_one_iteration_stops(tmp_path: Path) -> None:
    faults = [poison("first", 6), poison("second", 6)]
    options = ("--deadpool-nonfinite", "rollback")
    with Run(tmp_path / "r", options=options, faults=faults) as run:
        final = run.wait_end(4)
    assert "not finite either when it was computed before" in final["reason"]
