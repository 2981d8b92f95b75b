"""The unedited pretrain_gpt.py on CPU: it trains, equally each time, and resumes exactly."""

import math
from pathlib import Path

import pytest
import torch

from tests.common.programs import check_output
from tests.megatron_lm.harness.arguments import MOE, small
from tests.megatron_lm.harness.checkout import LOADS, checkout, needs_megatron_lm
from tests.megatron_lm.harness.ranks import Trained, train

pytestmark = [
    pytest.mark.megatron_lm,
    needs_megatron_lm,
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU"),
]

ITERATIONS = 4
SAVED_AT = 3

SHARDED: dict[str, object] = {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
LAYOUTS: dict[str, dict[str, object]] = {
    "whole, saved beside training": {"pipeline_model_parallel_size": 2, "async_save": True},
    "sharded": {**SHARDED, "dist_ckpt_optim_fully_reshardable": True},
    "sequence-parallel": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
    },
    "bf16, overlap": {
        **SHARDED,
        "bf16": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    # The first two steps overflow and are skipped.
    "fp16": {**SHARDED, "fp16": True, "initial_loss_scale": 2.0**20, "hysteresis": 1},
    "moe, saved beside training": {"use_distributed_optimizer": True, "async_save": True, **MOE},
}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
@LOADS
def test_trains_and_resumes_exactly(layout, tmp_path):
    there = set(_tree().rglob("*"))
    flags = {"train_iters": ITERATIONS, "ckpt_format": "torch_dist", **LAYOUTS[layout]}
    saves = tmp_path / "saves"
    whole = train(_tree(), tmp_path / "whole", small(**flags, save=saves, save_interval=SAVED_AT))
    losses = _losses(whole)
    assert list(losses) == list(range(1, ITERATIONS + 1))
    assert all(math.isfinite(loss) for loss in losses.values())
    assert losses[ITERATIONS] < losses[1]
    assert whole[0].skipped == (["1", "2"] if layout == "fp16" else [])
    if layout == "sequence-parallel":
        # Ranks 0 and 1 hold the norms in common; without the mark they drift apart unnoticed.
        assert whole[0].replicated == whole[1].replicated
        assert any("layernorm" in name for name in whole[0].replicated)

    # The last save, when training ends, is the newest.
    (saves / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    rest = train(_tree(), tmp_path / "rest", small(**flags, load=saves))
    assert list(_losses(rest)) == list(range(SAVED_AT + 1, ITERATIONS + 1))
    for before, after in zip(whole, rest, strict=True):
        assert after.state == before.state
        assert after.losses.items() <= before.losses.items()
        assert after.norms.items() <= before.norms.items()
        # A child would hold the sockets of a rank open beyond its death.
        assert before.forks == 0
    assert set(_tree().rglob("*")) == there, "something was written into the checkout"


@pytest.mark.full
def test_stand_ins_replace_nothing_on_a_gpu_machine_and_refuse_late_calls(tmp_path):
    answers = _run(f"""
absent = torch.cuda.is_available
torch.cuda.is_available = lambda: True
before = [sys.path[:], sys.pycache_prefix, dict(vars(torch.cuda))]
stand_ins.install_megatron_lm(tree)
print([sys.path, sys.pycache_prefix, dict(vars(torch.cuda))] == before, "megatron" in sys.modules,
      end=";")
torch.cuda.is_available = absent

def attempt(checkout):
    try:
        stand_ins.install_megatron_lm(checkout)
    except (RuntimeError, ValueError) as error:
        print(type(error).__name__, error, end=";")
attempt(pathlib.Path({str(tmp_path)!r}))
from deadpool_megatron.megatron import stand_ins
stand_ins.install()
attempt(tree)
""").split(";")
    assert answers[0] == "True False"
    assert answers[1].startswith("ValueError")
    assert answers[2].startswith("RuntimeError megatron.core was imported from")


def _run(program: str) -> str:
    """Run a program in a process of its own, since stand-ins stay; answers its last line."""
    start = f"""
import sys, torch, pathlib
from deadpool_megatron.megatron import stand_ins
tree = pathlib.Path({str(_tree())!r})
"""
    return check_output("-W", "ignore", "-c", start + program).strip().splitlines()[-1]


def _tree() -> Path:
    tree = checkout()
    assert tree is not None
    return tree.resolve()


def _losses(ranks: list[Trained]) -> dict[int, float]:
    return {int(step): float.fromhex(loss) for step, loss in ranks[-1].losses.items()}
