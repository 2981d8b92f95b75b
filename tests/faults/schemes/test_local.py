"""Whole runs under ``local`` and ``parity`` as long as every role has its own state."""

import pytest

from deadpool_megatron.layout.parity_groups import ParityPlacement
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers
from tests.faults.harness import layouts
from tests.faults.harness.jobs import fault, recomputed, restart_kinds, run_job, strike

pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.full]
LAYOUT = layouts.PP2_DP2
ITERATIONS = 12
LOCAL = "--deadpool-protection local"


def test_crashes_go_on_from_memory_a_lost_node_from_the_checkpoint(tmp_path):
    """A member, then all processes of a node but its agent, then the whole node."""
    plan = [
        fault("member", "optimizer.inside", when_role=0, when_iteration=3, signal="SEGV"),
        fault("vault", "forward", when_role=2, when_iteration=5, target="vault"),
        fault("members", "backward", when_role=2, when_iteration=5, target="members"),
        fault("node", "backward", when_role=1, when_iteration=9, target="node"),
    ]
    saves = f"--save {tmp_path / 'saves'} --save-interval 6"
    outcome = strike(
        tmp_path / "run", LAYOUT, ITERATIONS, plan, saving=saves, settings=LOCAL, spares=1
    )
    assert restart_kinds(outcome) == ["initial", "memory", "memory", "durable"]
    assert recomputed(outcome)[-1] == 2


def test_a_lost_node_without_a_checkpoint_ends_the_run_with_the_reason(tmp_path):
    plan = [fault("node", "backward", when_role=1, when_iteration=2, target="node")]
    outcome = run_job(tmp_path / "run", LAYOUT, ITERATIONS, plan, settings=LOCAL, spares=1)
    assert outcome.status == 1, outcome.story()
    assert outcome.final["reason"].startswith("--deadpool-protection local")
    assert outcome.final["reason"] in outcome.output


def test_a_damaged_slot_costs_nothing_where_it_is_there_twice(tmp_path):
    """The process dies when the generation is committed. With ``local`` this damage alone would
    send all roles back to the previous generation."""
    plan = [
        fault("damage", "vault.doubled", when_role=2, when_iteration=5, action="mark"),
        fault("death", "optimizer.inside", when_role=2, when_iteration=6),
    ]
    settings = "--deadpool-protection local-twice"
    outcome = strike(tmp_path / "run", LAYOUT, ITERATIONS, plan, settings=settings)
    assert restart_kinds(outcome) == ["initial", "memory"]
    assert recomputed(outcome) == [0]
    (found,) = outcome.of_kind("corruption")
    assert str(found.data["where"]).startswith("slot own-2-")


def test_a_crash_and_a_lost_holder_change_no_bit(tmp_path):
    """Role 0's process dies with the vault of its node, then the spare with the block of all."""
    nodes, spares = range(LAYOUT.nodes), [LAYOUT.nodes, LAYOUT.nodes + 1]
    plan = ProtectionPlan(SchemeNumbers(SchemeKind.PARITY, group=4))
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
