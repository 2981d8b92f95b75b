"""The coordinator's own machine and planner beside the fast model, on the same traces."""

import pytest

from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.sections import read_plan
from deadpool_megatron.simulation import exact, run
from deadpool_megatron.simulation.hazards import DAY, Failure, Trace
from deadpool_megatron.simulation.job import SIGNS
from tests.simulation.calibration import committed, job_of, recoveries, row_of
from tests.simulation.jobs import ROOT, plan_65b

PLAN = read_plan(ROOT / "configs" / "65b.yaml")


def way(name="hot swap"):
    return next(each for each in run.policies(plan_65b(), 1e-6) if each.name == name)


def lose(*losses):
    """Nodes that are lost at these seconds, and come back after a day."""
    return tuple(Failure(at, node, "hbm", "node", at + DAY) for at, node in losses)


def played(failures, days=0.2, *, name="hot swap"):
    return exact.simulate(plan_65b(), way(name), Trace(66, days * DAY, failures), "0")


def test_without_failures_each_iteration_counts():
    assert played(()).ettr == pytest.approx(1 / 1.01, abs=0.001)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hot swap", "hot swap, elastic", "the same, best cadence"])
def test_both_models_agree_on_a_bad_month(name):
    """Thirteen times the rate of the plan: nodes run out, and others fail in a recovery."""
    job = plan_65b()
    trace = job.hazards(50.0).trace("0 0", job.machines, 10)
    found, fast = (
        exact.simulate(job, way(name), trace, "0"),
        run.simulate(job, way(name), trace, "0"),
    )
    print(f"exact {found.ettr:.4f}, fast {fast.ettr:.4f}")
    assert found.ettr == pytest.approx(fast.ettr, abs=0.01)
    assert len(found.recoveries) == pytest.approx(len(fast.recoveries), abs=3)
    assert found.waited == pytest.approx(fast.waited, abs=0.01 * trace.seconds)
    assert found.reduced == pytest.approx(fast.reduced, abs=0.02 * trace.seconds)


def test_single_recoveries_are_those_of_the_calibration():
    """The file has what both models find today. Lost training differs by up to two iterations: the
    fast model takes each loss as one of a node, and a wrong number as seen an iteration later."""
    rows = committed()
    assert rows[0] == row_of(64)
    for row in rows:
        seeds = range(row["seeds"])
        if row["nodes"] < 4096:  # else its plan alone takes long
            assert row["fast"] == recoveries(job_of(row["nodes"]), "fast", seeds)
        for sign in SIGNS:
            found, fast = row["exact"][sign], row["fast"][sign]
            assert found["recovery"] == pytest.approx(fast["recovery"], abs=0.5)
            assert found["lost"] == pytest.approx(fast["lost"], abs=22.0)


def test_other_ways_are_those_of_the_fast_model():
    job = plan_65b()
    trace = job.hazards(50.0).trace("0 0", job.machines, 10)
    restart = way("in-job restart")
    assert exact.simulate(job, restart, trace, "0") == run.simulate(job, restart, trace, "0")


def test_pairs_are_fatal_by_placement():
    """Node 0 shares copies with one node; only its loss in the same recovery loses state."""
    placement = assess(PLAN).placement
    seats = placement.topology.seats
    partners = {seats[r] for r, role in placement.roles.items() if 0 in role.buddies}
    assert len(partners) == 1
    partner = partners.pop()
    for other, text in ((partner, ["state lost: back to a checkpoint"]), (partner + 1, [])):
        found = played(lose((3600.0, 0), (3605.0, other)))
        assert [*found.ends] == text
    # Once copies are complete again, the partner may be lost, too.
    assert not played(lose((3600.0, 0), (3700.0, partner))).ends


def test_a_run_without_spares_ends_or_shrinks():
    failures = lose((1000.0, 0), (2000.0, 1), (3000.0, 2))
    ended, smaller = played(failures), played(failures, name="hot swap, elastic")
    assert [*ended.ends] == ["no spare node for 300 s"]
    assert not smaller.ends
    assert smaller.reduced > 3 * 3600
    assert smaller.useful > 2 * ended.useful


def test_equal_seeds_give_equal_runs():
    trace = plan_65b().hazards(50.0).trace("same", 66, 3)
    runs = [exact.simulate(plan_65b(), way("hot swap, elastic"), trace, "0") for _ in range(2)]
    assert runs[0] == runs[1]


def test_no_state_is_lost_with_a_whole_rack():
    """Copies lie in other racks: the run continues with fewer replicas."""
    rack = tuple(range(8))
    found = played(lose(*((1000.0, node) for node in rack)), name="hot swap, elastic")
    assert "state lost: back to a checkpoint" not in found.ends
    assert found.reduced > 0
