"""The coordinator's own machine and planner beside the fast model, on the same traces."""

import pytest

from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.sections import read_plan
from deadpool_megatron.simulation.hazards import DAY, Failure, Trace
from deadpool_megatron.simulation.run import policies, simulate
from tests.simulated.exact import Exact
from tests.simulation.jobs import ROOT, plan_65b

PLAN = read_plan(ROOT / "configs" / "65b.yaml")


def lose(*losses):
    """Nodes that are lost at these seconds, and come back after a day."""
    return tuple(Failure(at, node, "hbm", "node", at + DAY) for at, node in losses)


def exact(failures, days=0.2, *, elastic=False):
    job = plan_65b()
    return Exact(PLAN, job, Trace(66, days * DAY, failures), "0", elastic=elastic).play()


def test_without_failures_each_iteration_counts():
    assert exact(()).ettr == pytest.approx(1 / 1.01, abs=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("elastic", [False, True])
def test_both_models_agree_on_a_bad_month(elastic):
    """Thirteen times the rate of the plan: nodes run out, and others fail in a recovery."""
    job = plan_65b()
    trace = job.hazards(50.0).trace("0 0", job.machines, 10)
    way = {each.name: each for each in policies(job, 1e-6)}
    found = Exact(PLAN, job, trace, "0", elastic=elastic).play()
    fast = simulate(job, way["hot swap, elastic" if elastic else "hot swap"], trace, "0")
    print(f"exact {found.ettr:.4f}, fast {fast.ettr:.4f}")
    assert found.ettr == pytest.approx(fast.ettr, abs=0.01)
    assert len(found.recoveries) == pytest.approx(len(fast.recoveries), abs=3)
    assert found.waited == pytest.approx(fast.waited, abs=0.01 * trace.seconds)
    assert found.reduced == pytest.approx(fast.reduced, abs=0.02 * trace.seconds)


def test_pairs_are_fatal_by_placement():
    """Node 0 shares copies with one node; only its loss in the same recovery loses state."""
    placement = assess(PLAN).placement
    seats = placement.topology.seats
    partners = {seats[r] for r, role in placement.roles.items() if 0 in role.buddies}
    assert len(partners) == 1
    partner = partners.pop()
    for other, text in ((partner, ["state lost: back to a checkpoint"]), (partner + 1, [])):
        run = exact(lose((3600.0, 0), (3605.0, other)))
        assert [*run.ends] == text
    # Once copies are complete again, the partner may be lost, too.
    assert not exact(lose((3600.0, 0), (3700.0, partner))).ends


def test_a_run_without_spares_ends_or_shrinks():
    failures = lose((1000.0, 0), (2000.0, 1), (3000.0, 2))
    ended, smaller = exact(failures), exact(failures, elastic=True)
    assert [*ended.ends] == ["no spare node for 300 s"]
    assert not smaller.ends
    assert smaller.reduced > 3 * 3600
    assert smaller.useful > 2 * ended.useful


def test_equal_seeds_give_equal_runs():
    trace = plan_65b().hazards(50.0).trace("same", 66, 3)
    runs = [Exact(PLAN, plan_65b(), trace, "0", elastic=True).play() for _ in range(2)]
    assert runs[0] == runs[1]


def test_no_state_is_lost_with_a_whole_rack():
    """Copies lie in other racks: the run continues with fewer replicas."""
    rack = tuple(range(8))
    run = exact(lose(*((1000.0, node) for node in rack)), elastic=True)
    assert "state lost: back to a checkpoint" not in run.ends
    assert run.reduced > 0
