"""The scheme ``parity`` as long as every role has its own state: crashes, and lost holders."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.layout.places.parity import ParityPlacement
from deadpool_megatron.layout.schemes import Kind, ProtectionPlan, Scheme
from tests.faults.harness import layouts
from tests.faults.harness.jobs import fault, recomputed, restart_kinds, strike

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.full]
LAYOUT = layouts.PP2_DP2
ITERATIONS = 12


def test_a_crash_and_a_lost_holder_change_no_bit(tmp_path: Path) -> None:
    """Role 0's process dies with the vault of its node, then the spare with the block of all."""
    nodes, spares = range(LAYOUT.nodes), [LAYOUT.nodes, LAYOUT.nodes + 1]
    plan = ProtectionPlan(Scheme(Kind.PARITY, group=4))
    domains = {node: str(node) for node in (*nodes, *spares)}
    placed = ParityPlacement({role: role for role in nodes}, domains, spares, plan, 1)
    ((holder,),) = (group.holders for group in placed.groups)
    faults = [
        fault("vault", "forward", when_role=0, when_iteration=3, target="vault"),
        fault("member", "backward", when_role=0, when_iteration=3, signal="SEGV"),
        fault("holder", "backward", when_role=2, when_iteration=7, target="node", nodes=[holder]),
    ]
    outcome = strike(
        tmp_path / "run",
        LAYOUT,
        ITERATIONS,
        faults,
        settings="--deadpool-protection parity",
        spares=2,
    )
    assert restart_kinds(outcome) == ["initial", "memory", "memory"]
    assert max(recomputed(outcome)) <= 1
    # The restored generation went into a block at the other spare, and so did all that followed.
    last = outcome.of_kind("committed")[-1]
    assert (last.epoch, last.iteration) == (3, ITERATIONS)
    assert any(event.epoch == 3 for event in outcome.of_kind("exposed"))
