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
    losses,
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


@pytest.mark.full
def test_overlap_changes_no_bit(text: str) -> None:
    arguments = f"{MODEL} {text} {PP2} {BF16} {BUCKETS}"
    # Buckets exist only with overlap; without parameter gathering the rest is sequential.
    plain = run_ranks(4, train, f"{arguments} --overlap-grad-reduce")[0]
    overlapped = run_ranks(4, train, f"{arguments} {OVERLAP}")[0]
    assert plain["hashes"] == overlapped["hashes"]
    assert plain["steps"] == overlapped["steps"]
