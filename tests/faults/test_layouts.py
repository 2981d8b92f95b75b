"""Ways to cut and update a model survive the loss of nodes and of a process, bit for bit.

Overlap, virtual pipeline and experts in a pipeline are in tests/megatron_lm/test_layouts.py, and in
test_aborted_nccl.py and schemes/test_recompute.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import layouts
from tests.faults.harness.jobs import Layout, fault, strike

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.full]
ITERATIONS = 12


def node(name: str, point: str, role: int, iteration: int, **options: Any) -> dict[str, Any]:
    """The node of ``role`` dies at ``point``."""
    return fault(
        name, point, when_role=role, when_iteration=iteration, **{"target": "node", **options}
    )


GATHER = {"when_op": "all_gather_single_coalesced"}
COMMON = [
    node("backward", "backward", 0, 3, when_microbatch=1),
    node("update", "optimizer.inside", 3, 6),
    node("before-scheduler", "optimizer.after", 1, 9, target="self"),
]
PLANS: dict[Layout, list[dict[str, Any]]] = {
    layouts.WHOLE_NODES: COMMON,
    layouts.INSTANCES: COMMON,
    layouts.PLAIN_OPTIMIZER: COMMON,
    # Data-parallel peers without the distributed optimizer have other experts, as many bytes.
    layouts.PLAIN_EXPERTS: COMMON,
    layouts.FP32: [*COMMON, node("gather", "comm", 2, 11, **GATHER)],
    # At this scale the first updates overflow: found-inf is all that such an iteration has.
    layouts.FP16: [
        node("in-a-skipped-update", "comm", 0, 2, when_section="optimizer", when_op="allreduce"),
        node("after-a-skipped-update", "optimizer.after", 2, 3),
        node("between-found-inf-and-norm", "comm.done", 1, 9, when_section="optimizer"),
    ],
    layouts.TENSOR_EXPERTS: [
        node("between-bias-and-norm", "grads.final", 1, 3),
        node("between-dense-and-expert-update", "optimizer.inside", 2, 6, when_optimizer=1),
        node("after-both-updates", "optimizer.updated", 0, 9, when_optimizer=1),
    ],
}


@pytest.mark.parametrize("layout", PLANS, ids=lambda layout: layout.name)
def test_layout_survives(tmp_path: Path, layout: Layout) -> None:
    plan = PLANS[layout]
    spares = 2 - (layout.nodes == 2)
    outcome = strike(tmp_path / "run", layout, ITERATIONS, plan, spares=spares, refill=len(plan))
    if layout is layouts.FP16:
        assert any(step["skipped"] for step in outcome.final["steps"])


def test_peers_that_capture_a_part_each_survive(tmp_path: Path) -> None:
    """Without the distributed optimizer: each piece is in the memory of two of four nodes."""
    settings = "--deadpool-share-snapshots on"
    options = {"spares": 2, "refill": len(COMMON), "settings": settings}
    strike(tmp_path / "run", layouts.FOUR_PEERS, ITERATIONS, COMMON, **options)


# Lag and cadence mean that what is restored is older; recompute keeps steps and not states. Where
# the state is hashed, parameters are gathered at once: the others look at every fifth only.
RECOMPUTE = "--deadpool-protection recompute --deadpool-full-every 5"
SETTINGS = {
    "unlooked": (layouts.OVERLAP, "--deadpool-hash-interval 5"),
    "lag 2, cadence 3": (layouts.OVERLAP, "--deadpool-max-lag 2 --deadpool-cadence 3"),
    "lag 2, 3+N slots": (layouts.PLAIN_OPTIMIZER, "--deadpool-max-lag 2 --deadpool-cadence 3"),
    "recompute, lag 1": (layouts.PP2_DP2, f"{RECOMPUTE} --deadpool-max-lag 1"),
}
SEVERAL = [
    *COMMON,
    fault("coordinator", "coordinator.journal", when_epoch=3),
    fault("vault", "vault.seal", when_role=2, when_iteration=12),
    node("communication", "comm", 2, 14, nth=2),
]


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_looked_at_less_or_restored_from_longer_ago_survives(
    tmp_path: Path, name: str
) -> None:
    layout, settings = SETTINGS[name]
    strike(tmp_path / "run", layout, 15, SEVERAL, spares=2, refill=4, settings=settings)
