"""A rank that ends badly is accounted for: by which signal, where it was, what it wrote."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.trainer.ranks import run_ranks

pytestmark = pytest.mark.slow


def alone(folder: Path, rank: int, world_size: int) -> None:
    """No groups."""


def end(how: str) -> None:
    """Rank 1 ends like that; the other waits to be killed."""
    if os.environ["RANK"] == "1":
        os.write(2, b"last words\n")
        if how == "abort":
            os.abort()
        raise ValueError(how)
    signal.pause()


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("abort", ("rank 1 died of SIGABRT", "last words", "Fatal Python error", "in end")),
        ("bad luck", ("rank 1 failed, status 1", "last words", "ValueError: bad luck", "in end")),
    ],
)
def test_the_end_of_a_rank_is_told(how: str, wanted: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(2, end, how, connect=alone)
    for words in wanted:
        assert words in str(caught.value)
    assert "rank 0" not in str(caught.value), "killed by us, not failed"


def test_a_rank_that_hangs_is_named() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 did not finish in time.* in end"):
        run_ranks(1, end, "", seconds=0.2, connect=alone)
