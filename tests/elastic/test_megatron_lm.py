"""pretrain_gpt.py continues with fewer model replicas, and with all of them again."""

import pytest

from deadpool_megatron.layout.ranks import SIZE_STEP
from tests.elastic.harness.runs import megatron_lm_job, run_elastic
from tests.faults.harness import jobs
from tests.megatron_lm.harness.arguments import MOE
from tests.megatron_lm.harness.checkout import TAG, needs_megatron_lm
from tests.megatron_lm.harness.runs import held_tree

NEWEST = pytest.mark.skipif(TAG != "core_v0.19.0", reason="elastic runs were tried on 0.19 only")
pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.slow,
    pytest.mark.full,
    needs_megatron_lm,
    NEWEST,
]

FIRST = jobs.dies("first", "forward", 1, 5)
FP16 = {"bf16": None, "fp16": True, "initial_loss_scale": 2.0**21, "hysteresis": 1}
EVALUATION = {"split": "90,5,5", "eval_interval": 4, "eval_iters": 1, "global_batch_size": 12}
# Name: flags, model replicas, nodes, members of each; faults; the numbers of replicas then.
CASES = {
    "dp4": ({}, 4, 4, 1, [FIRST], [4, 3]),
    "pp2 x dp3": ({"pipeline_model_parallel_size": 2}, 3, 3, 2, [FIRST], [3, 2]),
    "tp2 x dp2": ({"tensor_model_parallel_size": 2}, 2, 2, 2, [FIRST], [2, 1]),
    "ep2 x dp4": (MOE, 4, 4, 1, [FIRST], [4, 2]),
    "whole optimizer": (
        {"use_distributed_optimizer": None, "dist_ckpt_optim_fully_reshardable": None},
        4,
        4,
        1,
        [FIRST],
        [4, 3],
    ),
    "two instances": (
        {"num_distributed_optimizer_instances": 2, "overlap_grad_reduce": True},
        *(4, 4, 1, [FIRST], [4, 2]),
    ),
    "overlaps": (
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        *(4, 4, 1, [FIRST], [4, 3]),
    ),
    "fp16, updates skipped": (FP16, 4, 4, 1, [jobs.dies("first", "gate", 1, 6)], [4, 3]),
    "evaluation": (EVALUATION, 4, 4, 1, [jobs.dies("first", "evaluation.begin", 1, 4)], [4, 3]),
    "two losses": (
        {},
        *(4, 4, 1, [FIRST, jobs.dies("second", "forward", SIZE_STEP, 7)], [4, 3, 2]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_continues_as_stock_at_that_size(tmp_path, name):
    flags, replicas, nodes, members, plan, wanted = CASES[name]
    job = megatron_lm_job({"train_iters": 10, **flags}, replicas, nodes, members, every=1)
    outcome, sizes = run_elastic(tmp_path / "run", job, plan)
    assert sizes == wanted, outcome.story()


@pytest.mark.parametrize("losses", [1, 2])
def test_grows_as_stock_at_full_size(tmp_path, monkeypatch, losses):
    monkeypatch.setenv("DEADPOOL_TEST_HOLD", f"6-24={tmp_path}/run.grown")
    held_tree(tmp_path / "tree")
    plan = [FIRST, jobs.dies("second", "forward", SIZE_STEP, 6)][:losses]
    job = megatron_lm_job({"train_iters": 24}, 4, 4, within=tmp_path / "tree")
    outcome, sizes = run_elastic(tmp_path / "run", job, plan, grows=True, refill=losses)
    # The second loss may find the first new node, as a spare of the smaller size.
    assert sizes in ([4, 3, 4], [4, 3, 2, 4], [4, 3, 2, 3, 4]), outcome.story()
