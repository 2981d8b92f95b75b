"""Numbers that are not finite in pretrain_gpt.py, with and without Megatron-LM's own check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness.jobs import assert_unnoticed, fault, run_program, undisturbed
from tests.megatron_lm.harness.checkout import needs_megatron_lm
from tests.megatron_lm.harness.runs import PP2_DP2, gpt

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.slow,
    pytest.mark.full,
    needs_megatron_lm,
]


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({}, "process-crash"),  # found before the update: it wants to save and leave
        ({"rerun_mode": "disabled"}, "process-crash"),
        ({"no_check_for_nan_in_loss_and_grad": True}, "nonfinite-loss"),
    ],
    ids=["checked", "checked-once", "unchecked"],
)
def test_gradients_that_are_nan_once_leave_no_trace(
    tmp_path: Path, flags: dict[str, Any], kind: str
) -> None:
    program = gpt(**{**PP2_DP2, "train_iters": 8, **flags})
    plan = [fault("nan", "forward", when_iteration=5, when_role=3, action="mark")]
    outcome = run_program(tmp_path / "run", program, plan, settings="--deadpool-nonfinite rollback")
    assert_unnoticed(outcome, undisturbed(program), plan)
    (recovery,) = outcome.final["recoveries"]
    assert (recovery["kind"], recovery["generation"]) == (kind, [1, 4])


def test_nan_that_megatron_finds_ends_the_run_with_its_message(tmp_path: Path) -> None:
    # One update of this size leaves no finite parameter.
    program = gpt(nodes=2, lr=1e30, train_iters=6, rerun_mode="disabled")
    outcome = run_program(tmp_path / "run", program)
    assert outcome.status == 1, outcome.story()
    assert outcome.final["kind"] == "bug"
    reason = outcome.final["reason"]
    assert "2 times the same failure" in reason
    assert "nan" in reason.lower()
    assert "logs/node" in reason
