"""Saves of pretrain_gpt.py in any form, and other state that a run falls back to."""

from pathlib import Path

import pytest

from deadpool_megatron.cli.storage.verify import verify_checkpoint
from deadpool_megatron.vault.shm.slot_check import Verdict
from tests.faults.harness import jobs
from tests.megatron_lm.harness.arguments import MOE
from tests.megatron_lm.harness.checkout import LOADS
from tests.megatron_lm.harness.runs import PP2_DP2, dies, gpt, held_tree, strike

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, LOADS]
SAVES: dict[str, object] = {"save": "{run}/saves", "save_interval": 3, "train_iters": 9}
FP16: dict[str, object] = {
    "fp16": True,
    "initial_loss_scale": 2.0**21,
    "tensor_model_parallel_size": 2,
}
# With two nodes that hold each other's copies.
LAYOUTS: dict[str, tuple[dict[str, object], list[int]]] = {
    "shards": ({**PP2_DP2, "num_layers_per_virtual_pipeline_stage": 1}, [1, 0]),
    "whole": (FP16, [2, 0]),
    "experts": ({**PP2_DP2, **MOE}, [1, 0]),
}


def fallen(
    directory: Path,
    program: jobs.Program,
    nodes: list[int],
    wanted: jobs.Outcome | None = None,
    settings: str = "",
    at: int = 8,
) -> jobs.Outcome:
    """A run that loses an owner and its copies between two saves; dropout draws numbers in it."""
    plan = [dies("both", "forward", 0, at, nth=2, nodes=nodes)]
    outcome = strike(directory / "run", program, plan, wanted, refill=0, settings=settings)
    assert jobs.restart_kinds(outcome)[-1] == "durable", outcome.story()
    return outcome


def fallen_back_to(outcome: jobs.Outcome) -> int:
    """The iteration that the last epoch began with."""
    return int(outcome.of_kind("epoch-decided")[-1].data["generation"][1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_older_format_is_fallen_back_to_and_started_from(tmp_path, layout):
    flags, nodes = LAYOUTS[layout]
    flags = {**SAVES, **flags, "ckpt_format": "torch"}
    outcome = fallen(tmp_path, gpt(**flags), nodes)
    assert fallen_back_to(outcome) == 6
    assert [event.iteration for event in outcome.of_kind("durable")] == [3, 6, 9]
    saved = outcome.directory / "saves"
    found = verify_checkpoint(saved / "iter_0000009", lambda _: None)
    assert {one.verdict for one in found} == {Verdict.GOOD}
    (saved / "latest_checkpointed_iteration.txt").write_text("6")
    again = jobs.run_program(tmp_path / "again", gpt(**{**flags, "save": None, "load": saved}))
    jobs.assert_unnoticed(again, jobs.undisturbed(gpt(**flags)), [], after=6)


@pytest.mark.parametrize(
    "less", [{"no_save_optim": True}, {"no_save_rng": True, "ckpt_format": "torch"}], ids=str
)
def test_without_some_of_the_state_exports_are_fallen_back_to(tmp_path, monkeypatch, less):
    flags: dict[str, object] = {**SAVES, **PP2_DP2, **less}
    wanted = jobs.undisturbed(gpt(**flags))
    exports = tmp_path / "run" / "exports"
    monkeypatch.setenv("DEADPOOL_TEST_HOLD", f"8={exports / 'iter_0000005'}")
    program = gpt(within=held_tree(tmp_path / "tree").parent, **flags)
    outcome = fallen(tmp_path, program, [1, 0], wanted, "--deadpool-persist-interval 5")
    assert fallen_back_to(outcome) == 5
    counted = {Path(str(event.data["path"])).parent for event in outcome.of_kind("durable")}
    assert counted == {exports}
    assert (tmp_path / "run" / "saves" / "iter_0000009").is_dir()
