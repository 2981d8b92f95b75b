"""Where a closed form holds, the fast model agrees with it."""

import math
import random
from dataclasses import replace
from statistics import fmean

import pytest

from deadpool_megatron.planning.availability import training_share
from deadpool_megatron.simulation.hazards import DAY, HOUR, KINDS, RATES, Hazards, Trace
from deadpool_megatron.simulation.job import SIGNS, best_interval, useful_fraction
from deadpool_megatron.simulation.run import Policy, policies, simulate
from tests.simulation.jobs import plan_65b


def mean_ettr(job, policy, hazards, machines, days, seeds):
    traces = [hazards.trace(f"closed {n}", machines, days) for n in range(seeds)]
    return fmean(simulate(job, policy, t, str(n)).ettr for n, t in enumerate(traces))


@pytest.mark.parametrize(("interval", "cost", "stall"), [(600, 30, 300), (3600, 60, 900)])
def test_checkpoints_with_a_spare_for_each_failure_are_dalys_expression(interval, cost, stall):
    job, mtbf = plan_65b(), 3 * HOUR
    policy = Policy(
        *("saved", interval / (interval + cost), dict.fromkeys(SIGNS, stall)),
        *(interval + cost, 0.0),
    )
    # Repairs are over at once, so a spare is always there, and nodes fail all the time.
    hazards = Hazards(DAY / mtbf / job.nodes, 1e-6)
    found = mean_ettr(replace(job, spares=60), policy, hazards, job.nodes + 60, 400, 4)
    assert found == pytest.approx(useful_fraction(interval, cost, stall, mtbf), abs=0.006)


def test_the_best_interval_is_the_best():
    for cost, mtbf in ((10, 3 * HOUR), (60, 3 * HOUR), (300, 20 * HOUR)):
        tried = [60 * 1.05**n for n in range(150)]
        best = max(tried, key=lambda each: useful_fraction(each, cost, 0.0, mtbf))
        assert best_interval(cost, mtbf) == pytest.approx(best, rel=0.05)
        assert best_interval(cost, mtbf) == pytest.approx(math.sqrt(2 * cost * mtbf), rel=0.2)


@pytest.mark.parametrize("spares", [0, 1, 2, 3])
@pytest.mark.parametrize("elastic", [False, True])
def test_spares_are_the_binomial_share(spares, elastic):
    """Without the seconds of a recovery the share of training time is that of live nodes."""
    instant = dict.fromkeys(plan_65b().values, 0.0) | {"persist": 1e9}
    job = replace(plan_65b(), spares=spares, values=instant, partners=0.0)
    job = replace(job, sizes=(4, 6, 7, 8))
    change = 1e-3 if elastic else 0.0
    policy = Policy("hot", 1.0, dict.fromkeys(SIGNS, 0.0), 1e-3, 0.0, True, change=change)
    failing = sum(count for count, sign in KINDS.values() if sign == "node") / 419
    hazards = Hazards(24 / 1000 / failing, 24.0)
    found = mean_ettr(job, policy, hazards, job.machines, 300, 12)
    live = 1000 / 1024
    closed = training_share((4, 6, 7, 8) if elastic else (8,), 64, spares, live)
    # A run settles before it grows, and every wait is one of a minute before it shrinks.
    assert found * 64 / job.machines == pytest.approx(closed, abs=0.03)


def test_state_is_lost_as_often_as_pairs_fail_together():
    job = plan_65b("cluster.spares=60", f"cluster.failure_hours={48 * 419 / 335}")
    hazards = Hazards(0.5, 1.0)
    job = replace(job, partners=40.0)
    hot = next(each for each in policies(job, 0.5 / DAY) if each.name == "hot swap")
    traces = [hazards.trace(f"pairs {n}", job.machines, 60) for n in range(10)]
    runs = [simulate(job, hot, trace, str(n)) for n, trace in enumerate(traces)]
    lost = sum(run.ends["state lost: back to a checkpoint"] for run in runs)
    expected = 10 * 60 * DAY / job.pair_loss_mtbf
    assert expected > 40
    # During a recovery another failure prolongs it, and repairs keep some nodes from failing.
    assert lost == pytest.approx(expected, rel=0.35)


@pytest.mark.parametrize("shape", [0.7, 1.0, 1.5])
@pytest.mark.parametrize("lemons", [(0.0, 1.0), (0.05, 10.0)])
def test_traces_have_the_rate_and_the_mix(shape, lemons):
    hazards = Hazards(RATES["rsc-1"] / 1000, 1e-6, shape, *lemons)
    trace = hazards.trace("rate", 2000, 90)
    expected = RATES["rsc-1"] * 2 * 90
    assert len(trace.failures) == pytest.approx(expected, rel=0.13)
    hangs = sum(failure.sign == "hang" for failure in trace.failures)
    assert hangs == pytest.approx(expected * 24 / 419, rel=0.35)
    assert list(trace.failures) == sorted(trace.failures)


def test_llama_3_had_419_interruptions():
    assert sum(count for count, _ in KINDS.values()) == 419
    per_1000_node_days = 419 / 54 / (16_384 / 8) * 1000
    assert RATES["llama-3"] == pytest.approx(per_1000_node_days, abs=0.005)


def test_a_domain_fails_as_a_whole():
    domains = tuple(node // 8 for node in range(64))
    hazards = Hazards(0.1, 1.0, domain_share=1.0, domains=domains)
    trace = hazards.trace("racks", 64, 30)
    switches = [each for each in trace.failures if each.kind == "switch-or-cable"]
    moments = {each.at for each in switches}
    assert len(switches) == 8 * len(moments)


def test_equal_seeds_give_equal_runs():
    job = plan_65b()
    for policy in policies(job, 1 / DAY):
        runs = []
        for _ in range(2):
            trace = job.hazards(50.0).trace("same", job.machines, 30)
            runs.append(simulate(job, policy, trace, "same"))
        assert runs[0] == runs[1]


def test_nothing_is_lost_without_failures():
    job, quiet = plan_65b(), Trace(66, 30 * DAY, ())
    for policy in policies(job, 1 / DAY):
        run = simulate(job, policy, quiet, "")
        assert run.ettr == pytest.approx(policy.speed)
        assert not run.recoveries


def test_no_policy_gains_more_than_the_time_there_is():
    draw = random.Random("bounds")
    for number in range(30):
        job = plan_65b().assuming("rebuild", draw.uniform(1, 120)).assuming("persist", 600.0)
        trace = job.hazards(draw.uniform(1, 2000)).trace(str(number), job.machines, 5)
        for policy in policies(job, 1e-5):
            run = simulate(job, policy, trace, str(number))
            assert 0 <= run.ettr <= policy.speed
            assert run.waited + run.reduced <= 2 * run.seconds
