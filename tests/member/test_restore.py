"""The captured state is the whole state: go back to it and the same iterations follow, bit for bit.

Real Megatron on several forked ranks, for each kind of optimizer, precision and model that changes
what is unique state.
"""

from typing import Any

import pytest
import torch
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.qk_clip import clip_qk

from deadpool_megatron.megatron import dimensions
from deadpool_megatron.megatron.optimizer import ShardState, complete_state
from deadpool_megatron.member.peer_comparison import PeerMismatch
from tests.gpu.digests import state_digests
from tests.gpu.going_back import GoingBack
from tests.trainer.layouts import TINY, make_loop
from tests.trainer.ranks import run_ranks

MOE = (
    " --num-experts 4 --expert-model-parallel-size 2 --moe-router-score-function sigmoid"
    " --moe-router-enable-expert-bias --moe-input-jitter-eps 0.01 --disable-bias-linear"
)
# Whole runs of more layouts are in tests/faults and tests/megatron_lm.
LAYOUTS = {
    "bf16-distributed": "--bf16 --use-distributed-optimizer",
    "gathers-ahead": "--bf16 --use-distributed-optimizer --overlap-grad-reduce"
    " --overlap-param-gather --ddp-bucket-size 5000",
    "fp16-distributed-with-skips": "--fp16 --use-distributed-optimizer",
    "bf16": "--bf16",
    "fp32": "",
    "experts": "--bf16" + MOE,
}


def go_back(arguments: str) -> dict[str, Any]:
    """On one rank: three iterations, capture, two more, restore, the same two again."""
    loop, emitted = make_loop(arguments)
    complete_state(loop.optimizer)
    going = GoingBack(loop, 3)
    at_capture = state_digests(loop)
    first = going.train()
    back = going.back()
    second = going.train()
    return {
        "wrong after restore": [k for k in at_capture if back.get(k) != at_capture[k]],
        "wrong after replay": [k for k in first if second.get(k) != first[k]],
        "losses": [data["loss"] for kind, data in emitted if kind == "step"],
        "skipped": loop.counters["skipped_iterations"],
        "pieces": max(len(part.tensors) for part in going.parts),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_replay_from_captured_state_is_bit_identical(name):
    results = run_ranks(2, go_back, f"{TINY} {LAYOUTS[name]}")
    for result in results:
        assert result["wrong after restore"] == []
        assert result["wrong after replay"] == []
    losses = next(r["losses"] for r in results if r["losses"])
    assert losses[3:5] == losses[5:7]
    assert len(set(losses)) >= 4
    assert (results[0]["skipped"] > 0) == name.startswith("fp16")
    if name == "bf16-distributed":
        assert results[0]["pieces"] <= 3, "the shard is packed into few pieces"


def same_bytes(arguments: str) -> list[tuple[int, ...]]:
    """On one rank: which roles hold the same bytes of each part."""
    loop, _ = make_loop(arguments)
    complete_state(loop.optimizer)
    return [part.replicas for part in ShardState(loop.optimizer).parts]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["--bf16", ""], ids=["bf16", "fp32"])
def test_experts_of_peers_are_not_the_same_experts(precision):
    """Without the distributed optimizer, two of four on each rank: no other role has the bytes of
    a lost role, though their number is equal."""
    found = run_ranks(2, same_bytes, f"{TINY} {precision}{MOE}")
    assert found == [[(0, 1), (0,)], [(0, 1), (1,)]]


def packed_again(arguments: str) -> bool:
    """On one rank: whether the state of a second optimizer of a model, as a spare makes it that
    takes another role in place, is laid out as that of the first one."""
    loop, _ = make_loop(arguments)
    complete_state(loop.optimizer)
    first = ShardState(loop.optimizer)
    wanted = [part.signature() for part in first.parts]
    first.release()
    config = loop.optimizer.config
    other = get_megatron_optimizer(config, loop.model_chunks, use_gloo_process_groups=False)
    complete_state(other)
    return [part.signature() for part in ShardState(other).parts] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--bf16", "--use-distributed-optimizer"])
def test_a_model_that_gets_another_optimizer_is_laid_out_as_before(flags):
    """Else what others hold of the role would not fit, and a restore would be refused."""
    assert run_ranks(2, packed_again, f"{TINY} {flags}") == [True, True]


def forget_the_sync(arguments: str) -> str:
    """On one rank: restore the shard but leave out the parameter sync; what verify() says."""
    loop, _ = make_loop(arguments)
    loop.train_step()
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            next(iter(loop.model_chunks[0].parameters())).view(-1)[5] += 1
    try:
        dimensions.verify_data(loop)
    except PeerMismatch as error:
        return str(error)
    return ""


def test_a_missed_parameter_sync_is_found_by_comparison():
    flags = "--bf16 --use-distributed-optimizer"
    found = run_ranks(2, forget_the_sync, f"{TINY} {flags}")
    assert all("parameters of roles" in text for text in found)


def clip(arguments: str) -> list[str]:
    """On one rank: train, clip as Megatron does behind an update, cast the weights anew from their
    masters; the names of those that are others then."""
    loop, _ = make_loop(arguments)
    for _ in range(3):
        loop.train_step()
    for module in loop.model_chunks[0].modules():
        if hasattr(module, "clip_qk"):
            module.config.qk_clip = True
            # With Transformer Engine only: above the threshold of 100.
            module.core_attention.current_max_attn_logits = torch.full((4,), 130.0)
    clip_qk(loop.model_chunks)
    clipped = state_digests(loop)
    dimensions.rebuild_from_peers(loop)
    found = state_digests(loop)
    return [name for name in clipped if found[name] != clipped[name]]


def test_weights_clipped_by_qk_clip_differ_from_their_masters():
    """The reason for the refusal of --qk-clip."""
    (differing,) = run_ranks(1, clip, f"{TINY} --bf16")
    assert len(differing) == 2
    assert all(name.endswith("linear_qkv.weight") for name in differing)
