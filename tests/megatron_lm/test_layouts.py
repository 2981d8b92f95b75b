"""Every way to cut, update and feed the model survives the loss of nodes and processes."""

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness.jobs import Outcome
from tests.megatron_lm.harness import runs
from tests.megatron_lm.harness.arguments import MOE
from tests.megatron_lm.harness.checkout import TAG, TAGS, needs_megatron_lm

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full, needs_megatron_lm]

ITERATIONS = 8
LAYERS = "tests.megatron_lm.harness.local_layers"
#: the folder of a stand-in for a package that Muon needs
EMERGING = Path(__file__).parent / "harness" / "emerging"
COMMON = [
    runs.dies("forward", "forward", 0, 2, nth=2),
    runs.dies("update", "optimizer.inside", 3, 4),
    runs.dies("after-update", "optimizer.updated", 1, 6, target="self"),
    runs.dies("communication", "comm", 2, 8, nth=3),
]
# Dropout is 0.1 and the embeddings are tied, unless a layout differs.
LAYOUTS: dict[str, tuple[dict[str, object], list[dict[str, Any]]]] = {
    "fp32, whole optimizer, untied": (
        {
            # A schedule by samples is Megatron's own for a role taken in place, too.
            "train_iters": None,
            "train_samples": 64,
            "lr_warmup_samples": 40,
            "pipeline_model_parallel_size": 2,
            "untie_embeddings_and_output_weights": True,
            "mtp_num_layers": 1,
            "position_embedding_type": "rope",
            "no_rope_fusion": True,
            "log_interval": 3,
            "timing_log_level": 2,
            "rerun_mode": "disabled",
        },
        # A spare for role 0 is there first.
        [runs.dies("forward", "forward", 1, 2, nth=2), *COMMON[1:]],
    ),
    "bf16, two optimizer instances, full recompute": (
        {
            "bf16": True,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "calculate_per_token_loss": True,
            "use_distributed_optimizer": True,
            "num_distributed_optimizer_instances": 2,
            "overlap_grad_reduce": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "exit_signal_handler": True,
        },
        COMMON,
    ),
    "fp16, first updates skipped, virtual pipeline, exit interval": (
        {
            **runs.PP2_DP2,
            **runs.SEGMENTS,
            "bf16": None,
            "fp16": True,
            "initial_loss_scale": 2.0**21,
            "hysteresis": 1,
            "num_layers_per_virtual_pipeline_stage": 1,
            "train_iters": 20,
            "exit_interval": ITERATIONS,
        },
        [
            runs.dies("in-a-skipped-update", "gate", 0, 2),
            runs.dies("after-a-skipped-update", "log.begin", 3, 2),
            runs.dies("evaluation", "evaluation.end", 1, 4, target="self"),
            runs.dies("update", "optimizer.updated", 2, 6),
        ],
    ),
    "sequence parallel, loader processes": (
        {
            "bf16": True,
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "num_workers": 2,
            "dataloader_type": "cyclic",
            "rerun_mode": "validate_results",
        },
        [*COMMON[:3], runs.dies("data", "data.next", 2, 8, nth=2)],
    ),
    "experts": (
        {
            **runs.PP2_DP2,
            **runs.SEGMENTS,
            **MOE,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "global_aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_z_loss_coeff": 1e-3,
            "moe_input_jitter_eps": 0.01,
            "log_interval": 3,
        },
        [
            runs.dies("forward", "forward", 0, 2, nth=2),
            runs.dies("first-update", "optimizer.updated", 3, 4, when_optimizer=0),
            runs.dies("evaluation", "evaluation.end", 3, 4, when_epoch=3),
            # In the middle of an interval of the log, and after the evaluation.
            runs.dies("next-forward", "forward", 0, 5, nth=2),
            runs.dies("last-update", "optimizer.updated", 1, 6, when_optimizer=1, target="self"),
            runs.dies("log", "log.end", 3, 7),
        ],
    ),
    "kinds of layers, segments that differ": (
        {
            **runs.PP2_DP2,
            **MOE,
            "script": "pretrain_hybrid.py",
            "num_layers": None,
            "disable_bias_linear": True,
            "hybrid_layer_pattern": "*-E|-|*|-*",
            "spec": (LAYERS, "hybrid_stack_spec"),
            "deadpool_allow_unreviewed": f"spec={LAYERS}",
        },
        # A spare for role 0 is there first, and role 3 has other layers, none with experts.
        [runs.dies("forward", "forward", 3, 2, nth=2), *COMMON[1:]],
    ),
    "whole matrices dealt out": (
        {
            **runs.SEGMENTS,
            "bf16": True,
            "optimizer": "dist_muon",
            "tensor_model_parallel_size": 2,
            "muon_tp_mode": "distributed",
            "untie_embeddings_and_output_weights": True,
        },
        COMMON,
    ),
    "experts by quantiles, yarn": (
        {
            **runs.PP2_DP2,
            **MOE,
            "position_embedding_type": "yarn",
            "moe_router_score_function": "sqrtsoftplus",
            "moe_router_load_balancing_type": "quantile_balancing",
        },
        # The bias of an expert changes in each iteration, with the end of the backward pass.
        [COMMON[0], *COMMON[2:]],
    ),
}
# Since 0.18 buffers are cut so that each shard has whole parameters, by default.
if TAG not in ("core_v0.16.1", "core_v0.17.1"):
    muon = {"bf16": True, "optimizer": "muon", "use_distributed_optimizer": True}
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    LAYOUTS["whole matrices dealt out by buffers"] = (
        {**runs.SEGMENTS, **muon, **overlap, "calculate_per_token_loss": True}
        | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        COMMON,
    )
    LAYOUTS["whole matrices dealt out, experts"] = (
        {**runs.SEGMENTS, **muon, **overlap, **MOE, "no_use_layer_wise_param_layout": True},
        COMMON,
    )
#: flags and values that this tag does not have
if TAG not in ("core_v0.16.1", "core_v0.17.1"):
    LAYOUTS["bf16, two optimizer instances, full recompute"][0].update(
        global_batch_size=None, step_batch_size_schedule="0:8 1024:16 3072:24"
    )
if TAGS[-1] != TAG:
    del LAYOUTS["experts by quantiles, yarn"], LAYOUTS["kinds of layers, segments that differ"]


# Nothing of an audit is left in the state, dropout's random numbers included.
AUDITED = "--deadpool-audit-interval 3"
SETTINGS = {
    "sequence parallel, loader processes": AUDITED,
    "fp16, first updates skipped, virtual pipeline, exit interval": AUDITED,
}


def import_path(before: str) -> str:
    """With what the layers are in, and the stand-in where its package is not there."""
    folders = [before, str(Path(__file__).parents[2])]
    if not importlib.util.find_spec("emerging_optimizers"):
        folders.append(str(EMERGING))
    return os.pathsep.join(folders)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_survives(tmp_path, name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", import_path(os.environ["PYTHONPATH"]))
    flags, plan = LAYOUTS[name]
    program = runs.gpt(**{"train_iters": ITERATIONS, **flags})
    outcome = runs.strike(tmp_path / "run", program, plan, settings=SETTINGS.get(name, ""))
    assert len(outcome.final["steps"]) == ITERATIONS
    check = CHECKS.get(name)
    if check is not None:
        check(outcome)


def skipped_two(outcome: Outcome) -> None:
    audited_with_passes(outcome, [6])
    skipped = [step["iteration"] for step in outcome.final["steps"] if step["skipped"]]
    assert skipped[:2] == [1, 2]
    assert len(skipped) < ITERATIONS


def logged_auxiliary_losses(outcome: Outcome) -> None:
    lines = [text for facts in runs.printed(outcome).values() for text in facts]
    assert any("load_balancing_loss" in line for line in lines)


def logged_timers_and_served_in_place(outcome: Outcome) -> None:
    printed_by_members = runs.output_of_members(outcome)
    assert "forward-compute" in printed_by_members
    assert "takes role 1 in place" in printed_by_members
    causes = [event.data["cause"] for event in outcome.of_kind("epoch-closed")]
    assert not any("lays out its state in another way" in cause for cause in causes)


def audited_with_passes(outcome: Outcome, iterations: Iterable[int] = (3, 6)) -> None:
    assert set(iterations) <= {event.iteration for event in outcome.of_kind("audited")}
    assert "do not compare passes" not in runs.output_of_members(outcome) + str(outcome.events)


CHECKS = {
    "sequence parallel, loader processes": audited_with_passes,
    "fp16, first updates skipped, virtual pipeline, exit interval": skipped_two,
    "experts": logged_auxiliary_losses,
    "fp32, whole optimizer, untied": logged_timers_and_served_in_place,
}
