"""Words are what the rows say, and closed forms what is simulated."""

import pytest

from deadpool_megatron.simulation import answer
from deadpool_megatron.simulation.hazards import HOUR
from tests.simulation.jobs import plan_65b

SEEDS = [f"answer {number}" for number in range(20)]


def rows_of(job):
    found = answer.traces(job, 0.0, 30.0, SEEDS)
    return answer.compare(job, found, 0.0), found


def frequent(hours, overhead):
    """The 65B plan, of which a node fails after so many hours, and is back after one."""
    overrides = [f"cluster.failure_hours={hours}", "cluster.repair_hours=1", "cluster.spares=8"]
    return plan_65b(*overrides).assuming("overhead", overhead)


def test_hot_swap_is_worth_as_much_as_a_restart_at_the_limits():
    overhead, _ = answer.break_even(frequent(500, 0.01))
    _, mtbf = answer.break_even(plan_65b())
    for job in (frequent(500, overhead), frequent(mtbf * 64 / HOUR, 0.01)):
        rows, _ = rows_of(job)
        swap, restart = rows["hot swap"]["ettr"], rows["in-job restart"]["ettr"]
        print(f"hot swap {swap:.4f}, restart in the job {restart:.4f}")
        assert swap == pytest.approx(restart, abs=0.006)


def test_answers_are_the_differences_of_the_rows():
    job = plan_65b()
    rows, found = rows_of(job)
    text, hours = " ".join(answer.sentences(job, rows, found, 0.0)), 66 * 8 * 24 * 30
    gain = (rows["hot swap"]["goodput"] - rows["restart, async"]["goodput"]) * hours
    assert f"hot swap {gain:+,.0f} over restarts from checkpoints" in text
    assert "Protecting one iteration in 23 adds" in text
