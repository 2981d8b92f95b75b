"""What is left of a launch configuration on a CPU."""

from __future__ import annotations

from typing import Any

from tests.reach.shrinking import Known, Shrunk, chosen, shrink

NAMES = """
--num-layers --tensor-model-parallel-size --pipeline-model-parallel-size --save --save-interval
--expert-model-parallel-size --num-virtual-stages-per-pipeline-rank --recompute-modules
"""
KNOWN = {name: Known((), takes_value=True) for name in NAMES.split()}
KNOWN["--optimizer"] = Known(("adam", "muon"), takes_value=True)
KNOWN["--bf16"] = Known((), takes_value=False)


def left(script: str = "pretrain_gpt.py", **flags: Any) -> Shrunk:
    given = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    return shrink("one", script, given, KNOWN)


def test_each_kind_of_parallelism_stays_with_two_ranks() -> None:
    sizes = {"tensor_model_parallel_size": "1", "pipeline_model_parallel_size": "16"}
    sizes |= {"num_virtual_stages_per_pipeline_rank": "5", "expert_model_parallel_size": "64"}
    shrunk = left(num_layers="80", **sizes, context_parallel_size="2")
    assert shrunk.flags.startswith(
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
        " --expert-model-parallel-size 2 --num-experts 4 "
    )
    assert shrunk.without == ["context parallelism"]


def test_what_only_a_gpu_or_a_fork_has_is_left_out_and_named() -> None:
    foreign = {"fp8_format": "hybrid", "optimizer": "ademamix", "xielu": True}
    shrunk = left(bf16=True, **foreign, recompute_modules=["[moe_act", "mlp]"], save=True)
    assert "--bf16 --recompute-modules mlp --save {run}/save " in shrunk.flags
    what = ["fp8", "--optimizer=ademamix", "--xielu"]
    assert shrunk.without == [*what, "recomputing what Transformer Engine computes"]


def test_a_hybrid_pattern_keeps_one_layer_of_each_kind_in_each_stage() -> None:
    sizes = {"pipeline_model_parallel_size": "4", "save_interval": "9"}
    shrunk = left("pretrain_mamba.py", hybrid_override_pattern="M-M*M-", **sizes)
    assert shrunk.script == "pretrain_hybrid.py"
    assert "--hybrid-layer-pattern *-|*- " in shrunk.flags
    assert "--save-interval" not in shrunk.flags
    assert shrunk.without == ["state spaces"]


def test_those_with_the_most_different_flags_are_chosen() -> None:
    ones = [Shrunk(name, "", flags) for name, flags in (("a", "x"), ("b", "y"), ("c", "x y z"))]
    assert [one.id for one in chosen(ones, 1)] == ["c"]
