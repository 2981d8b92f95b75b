"""Whole runs under parity: as many losses at once as it survives, and the files of a dump."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness.jobs import assert_unnoticed, fault, recomputed, reference, run_job
from tests.faults.harness.layouts import PP2_DP2

pytestmark = [pytest.mark.slow, pytest.mark.full]
ITERATIONS = 12


def test_two_nodes_of_a_group_at_once_and_a_third_one_without_a_spare(tmp_path: Path) -> None:
    """Four roles in one group with two parity blocks on the spares, which take over both roles;
    then groups are smaller, for want of nodes. The last loss finds no spare: what is left of the
    group lies in the files of the dump, and the next job computes the lost role from them.
    """
    plan = [
        fault("two", "backward", when_role=0, when_iteration=5, target="node", nodes=[0, 2]),
        fault("third", "optimizer.inside", when_role=1, when_iteration=9, target="node"),
    ]
    parity = "--deadpool-protection parity --deadpool-replicas 2 --deadpool-parity-group"
    dumped = run_job(
        tmp_path / "run",
        PP2_DP2,
        ITERATIONS,
        plan,
        spares=2,
        settings=f"{parity} 4 --deadpool-spare-timeout 1",
    )
    assert dumped.status == 75, dumped.story()
    assert {event.role for event in dumped.of_kind("decoded")} == {0, 2}
    assert max(recomputed(dumped)) <= 1
    resume = ("--resume", str(tmp_path / "run"))
    heads = "--num-attention-heads 8"  # as many bytes
    other = run_job(tmp_path / "other", PP2_DP2, ITERATIONS, flags=heads, arguments=resume)
    assert (other.status, other.of_kind("step")) == (2, []), other.story()
    assert "num_attention_heads is 4 there and 8 here" in other.final["reason"]
    resumed = run_job(
        tmp_path / "resumed",
        PP2_DP2,
        ITERATIONS,
        arguments=resume,
        settings=f"{parity} 2",  # there are no spares to hold blocks of four
    )
    assert {event.role for event in resumed.of_kind("decoded")} == {1}, resumed.story()
    assert_unnoticed(resumed, reference(PP2_DP2, ITERATIONS), [])
    assert resumed.final["steps"][0]["iteration"] > 6, "it did not start anew"
