"""Saves of pretrain_gpt.py of any form, and what a run falls back to beside them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.cli.storage.verifying import verify_checkpoint
from deadpool_megatron.vault.shm.slot_check import Verdict
from tests.faults.harness.jobs import Outcome, restart_kinds
from tests.megatron_lm.harness.arguments import MOE
from tests.megatron_lm.harness.checkout import LOADS
from tests.megatron_lm.harness.runs import PP2_DP2, dies, gpt, strike

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, LOADS]
SAVES: dict[str, object] = {"save": "{run}/saves", "save_interval": 3, "train_iters": 9}
TORCH: dict[str, object] = {**SAVES, "ckpt_format": "torch"}
LAYOUTS: dict[str, dict[str, object]] = {
    "shards": {**PP2_DP2, "num_layers_per_virtual_pipeline_stage": 1},
    "whole, fp16": {"fp16": True, "initial_loss_scale": 2.0**21, "tensor_model_parallel_size": 2},
    "experts": {**PP2_DP2, **MOE},
}


def fallen(directory: Path, layout: dict[str, object], settings: str = "") -> Outcome:
    """A run that loses an owner and its copies between two saves; dropout draws numbers in it."""
    plan = [dies("both", "forward", 0, 8, nth=2, nodes=[1, 0])]
    outcome = strike(directory / "run", gpt(**layout), plan, refill=0, settings=settings)
    assert restart_kinds(outcome)[-1] == "durable", outcome.story()
    return outcome


def fallen_back_to(outcome: Outcome) -> Path:
    """The checkpoint that the last epoch began with."""
    return Path(outcome.of_kind("epoch-decided")[-1].data["path"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_older_format_is_fallen_back_to(tmp_path: Path, layout: str) -> None:
    outcome = fallen(tmp_path, {**TORCH, **LAYOUTS[layout]})
    saved = outcome.directory / "saves"
    found = [event.iteration for event in outcome.of_kind("durable")]
    assert found == [3, 6, 9]
    last = saved / "iter_0000009"
    assert {one.verdict for one in verify_checkpoint(last, lambda _: None)} == {Verdict.GOOD}
