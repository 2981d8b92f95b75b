"""Equal arguments train equal bits, in every layout that stock gloo can train."""

from __future__ import annotations

import math

import pytest

from tests.trainer.layouts import (
    BF16,
    BUCKETS,
    LAYOUTS,
    MODEL,
    OVERLAP,
    PP2,
    TP2,
    losses,
    make_loop,
    steps,
    train,
)
from tests.trainer.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_runs_are_bit_identical(name: str, text: str) -> None:
    ranks, flags = LAYOUTS[name]
    arguments = f"{MODEL} {text} {flags} --eval-interval 3 --eval-iters 1"
    one, other = (run_ranks(ranks, train, arguments)[0] for _ in range(2))
    for key in ("steps", "evaluations", "hashes"):
        assert one[key] == other[key]
    assert len(one["evaluations"]) == 2
    series = losses(one)
    assert all(math.isfinite(loss) for loss in series)
    assert series[-1] < series[0] - 0.3, "it learns"
    # Replicas hold the same bits except where an optimizer is sharded.
    if name.endswith("-whole"):
        assert len(set(one["hashes"])) == ranks // 2
    if name.startswith("fp16"):
        assert 0 < one["skipped"] < 6
        skipped = [step for step in one["steps"] if step["skipped"]]
        assert len(skipped) == one["skipped"]
        assert all(step["grad_norm"] is None for step in skipped)
    else:
        assert one["skipped"] == 0


def test_the_seed_matters(text: str) -> None:
    arguments = f"{MODEL} {text} {BF16} --train-iters 3"
    (one,) = run_ranks(1, train, arguments)
    (other,) = run_ranks(1, train, f"{arguments} --seed 12")
    assert one["hashes"] != other["hashes"]
    assert losses(one) != losses(other)


def test_at_the_default_scale_a_half_precision_run_starts_by_skipping(text: str) -> None:
    (facts,) = run_ranks(1, train, f"{MODEL} {text} --fp16 --use-distributed-optimizer")
    assert facts["skipped"] == 6
    assert losses(facts)[0] == pytest.approx(losses(facts)[-1], abs=0.1)
    assert {float.fromhex(step["learning_rate"]) for step in facts["steps"]} == {0.0}


@pytest.mark.full
def test_overlap_changes_no_bit(text: str) -> None:
    arguments = f"{MODEL} {text} {PP2} {BF16} {BUCKETS}"
    # Buckets exist only with overlap; without parameter gathering the rest is sequential.
    plain = run_ranks(4, train, f"{arguments} --overlap-grad-reduce")[0]
    overlapped = run_ranks(4, train, f"{arguments} {OVERLAP}")[0]
    assert plain["hashes"] == overlapped["hashes"]
    assert plain["steps"] == overlapped["steps"]


def replicated_parameters(arguments: str) -> dict[str, str]:
    """Digests of the parameters that all tensor ranks of a stage must agree on."""
    from deadpool_megatron.hooks.training_state.hashing import state_digests

    loop, _ = make_loop(arguments)
    steps(loop, 4)
    replicated = ("layernorm", "linear_proj.bias", "linear_fc2.bias", "position_embeddings")
    return {
        name: digest
        for name, digest in state_digests(loop).items()
        if name.startswith("parameter") and any(word in name for word in replicated)
    }


@pytest.mark.full
def test_sequence_parallel_keeps_replicated_parameters_equal(text: str) -> None:
    found = run_ranks(
        4, replicated_parameters, f"{MODEL} {text} {TP2} {PP2} {BF16} --sequence-parallel"
    )
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert len(found[0]) >= 10


@pytest.mark.full
def test_the_dispatchers_agree(text: str) -> None:
    answers = []
    for name in ("moe-alltoall", "moe-allgather"):
        ranks, flags = LAYOUTS[name]
        answers.append(run_ranks(ranks, train, f"{MODEL} {text} {flags}")[0]["hashes"])
    assert answers[0] == answers[1]
