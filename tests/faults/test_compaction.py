"""With halves of masters on the wires a struck run is the undisturbed one, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator.reporting.run_files import DETAIL_VARIABLE
from tests.faults import layouts
from tests.faults.jobs import (
    Outcome,
    assert_unnoticed,
    fault,
    recomputed,
    run_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.full]
LAYOUT = layouts.PP2_DP2
ITERATIONS = 12


def shipped(outcome: Outcome, iteration: int) -> dict[int | None, int]:
    """Role -> bytes that it sent for a generation."""
    return {
        event.role: event.data["bytes"]
        for event in outcome.of_kind("committed")
        if event.iteration == iteration
    }


def test_lost_nodes_come_back_from_copies_that_came_as_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First before and then after the spare has taken over what its node keeps for others."""
    plan = [
        fault("first", "backward", when_role=1, when_iteration=5, target="node"),
        fault("second", "optimizer.inside", when_role=2, when_iteration=9, target="node"),
    ]
    monkeypatch.setenv(DETAIL_VARIABLE, "all")
    wanted = run_job(tmp_path / "whole", LAYOUT, ITERATIONS)
    settings = "--deadpool-compaction on --deadpool-cadence 1"
    outcome = run_job(tmp_path / "run", LAYOUT, ITERATIONS, plan, settings=settings, spares=2)
    assert_unnoticed(outcome, wanted, plan)
    assert max(recomputed(outcome)) <= 1
    # Before, between and after the losses. Not each of them: who is late on a busy machine is not
    # waited for.
    for iterations in (range(1, 5), range(6, 9), range(10, 13)):
        for role in range(LAYOUT.roles):
            assert any(
                0.80 < shipped(outcome, one).get(role, 0) / shipped(wanted, one)[role] < 0.88
                for one in iterations
            )
