"""An exception of Megatron-LM's own check of losses is a bug, and ends the run as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness.jobs import run_program
from tests.megatron_lm.harness.checkout import needs_megatron_lm
from tests.megatron_lm.harness.runs import gpt

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.slow,
    pytest.mark.full,
    needs_megatron_lm,
]


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
