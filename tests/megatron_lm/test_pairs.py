"""Pairs of flags that change what is computed, updated, saved and recorded, in whole runs."""

import os

import pytest

from tests.megatron_lm.harness.arguments import MOE
from tests.megatron_lm.harness.checkout import TAG, TAGS, needs_megatron_lm
from tests.megatron_lm.harness.runs import dies, gpt, strike
from tests.megatron_lm.test_layouts import LAYOUTS, import_path

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, needs_megatron_lm]

COMMON = {**MOE, "disable_bias_linear": True, "bf16": True, "pipeline_model_parallel_size": 2}
COMMON |= {"train_iters": 5, "save": "{run}/saves", "save_interval": 2}
# Three values of each of four factors. "kinds": the flags of that layout alone.
VALUES = """
moe_shared_expert_intermediate_size=64 moe_shared_expert_overlap
num_layers_per_virtual_pipeline_stage=1 overlap_moe_expert_parallel_comm
kinds
optimizer=sgd
optimizer=muon
optimizer=muon use_distributed_optimizer overlap_grad_reduce overlap_param_gather
ckpt_format=torch no_save_rng
ckpt_format=torch_dist no_save_optim
async_save async_strategy=nvrx use_persistent_ckpt_worker
enable_experimental normalization=RMSNorm fused_residual_rmsnorm
profile profile_step_start=1 profile_step_end=4 use_pytorch_profiler tensorboard_dir={run}/board
inprocess_restart enable_ft_package adlr_autoresume non_persistent_ckpt_type=local
""".strip().split("\n")
KINDS = ("script", "num_layers", "hybrid_layer_pattern", "spec", "deadpool_allow_unreviewed")


# Nine runs have each pair of values of two factors.
@pytest.mark.skipif(TAGS[-1] != TAG, reason="older parsers lack some of the flags")
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("first", range(3))
def test_pairs(tmp_path, first, second, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", import_path(os.environ["PYTHONPATH"]))
    row = (first, second, (first + second) % 3, (first + 2 * second) % 3)
    chosen = " ".join(VALUES[3 * factor + value] for factor, value in enumerate(row)).split()
    flags = COMMON | {flag: value or True for flag, _, value in (w.partition("=") for w in chosen)}
    if flags.pop("kinds", False):
        layout, _ = LAYOUTS["kinds of layers, segments that differ"]
        flags |= {flag: layout[flag] for flag in KINDS}
    plan = [
        dies("forward", "forward", 0, 2, nth=2),
        dies("exchange", "comm", 1, 3, nth=3, when_op="all_to_all_single"),
        dies("update", "optimizer.inside", 3, 4),
    ]
    strike(tmp_path / "run", gpt(**flags), plan)
