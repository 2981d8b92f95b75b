"""Verdicts from what is measured: who is slow, and when protection becomes thinner or denser."""

import random
from collections.abc import Mapping

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.cluster.watch import windows
from deadpool_megatron.settings import Settings

EPOCH = 2
STEPS = st.floats(0.01, 30.0)


class Job:
    """Four roles, one on each node, unless told; ``run`` lets a window go by."""

    def __init__(self, nodes: Mapping[int, int] | None = None, groups: str = "aaaa") -> None:
        self.watch = windows.SlownessWatch(Settings().slow_factor)
        self.nodes = nodes or {role: role for role in range(4)}
        self.peers = [tuple(r for r in range(4) if groups[r] == own) for own in groups]
        self.done = dict.fromkeys(self.nodes, windows.OwnTime(0, 0.0))
        self.epoch = 1
        self.look()

    def look(self) -> list[windows.Slowness]:
        players = {
            role: windows.Player(node, self.peers[role], self.done[role])
            for role, node in self.nodes.items()
        }
        return self.watch.look(self.epoch, players)

    def run(
        self, *seconds: float, iterations: int = windows.WINDOW_ITERATIONS
    ) -> list[windows.Slowness]:
        for role, each in enumerate(seconds):
            before = self.done[role]
            total = before.seconds + each * iterations
            self.done[role] = windows.OwnTime(before.iterations + iterations, total)
        return self.look()


def test_a_slow_node_is_told_once_after_enough_windows_and_once_when_it_is_over() -> None:
    job = Job()
    for _ in range(windows.WINDOWS - 1):
        assert job.run(0.1, 0.1, 0.2, 0.1) == []
    (verdict,) = job.run(0.1, 0.12, 0.2, 0.1)
    assert (verdict.node, verdict.role, verdict.over) == (2, 2, False)
    assert abs(verdict.peer_seconds - 0.1) < 1e-9
    assert abs(verdict.factor - 2.0) < 1e-6
    assert job.run(0.1, 0.1, 0.2, 0.1) == []
    assert set(job.watch.slow) == {2}
    (over,) = job.run(0.1, 0.1, 0.1, 0.1)
    assert (over.node, over.over) == (2, True)
    assert job.run(0.1, 0.1, 0.1, 0.1) == []
    assert not job.watch.slow


def test_no_verdict_before_a_window_is_full() -> None:
    job = Job()
    for _ in range(windows.WINDOWS * windows.WINDOW_ITERATIONS - 1):
        assert job.run(0.1, 0.1, 0.9, 0.1, iterations=1) == []
    assert job.run(0.1, 0.1, 0.9, 0.1, iterations=1)


@pytest.mark.slow
@pytest.mark.parametrize("slow", [None, 5])
def test_an_hour_of_noise_names_nobody_but_the_node_that_is_slow(slow: int | None) -> None:
    """Sixteen nodes with iterations of half a second. Every hundredth one of each node has a pause:
    mostly of a whole iteration, now and then of fifty of them.
    """
    noise, roles = random.Random(1), range(16)
    watch, totals = windows.SlownessWatch(Settings().slow_factor), [0.0 for _ in roles]
    named: dict[int, int] = {}
    for iteration in range(7200):
        players = {
            r: windows.Player(r, (*roles,), windows.OwnTime(iteration, totals[r])) for r in roles
        }
        for verdict in watch.look(1, players):
            named.setdefault(verdict.node, iteration)
        for role in roles:
            usual = noise.lognormvariate(0.0, 0.1) * (1.5 if role == slow else 1.0)
            pause = min(50.0, noise.paretovariate(1.2)) if noise.random() < 0.01 else 0.0
            totals[role] += 0.5 * (usual + pause)
    assert named == ({} if slow is None else {slow: windows.WINDOWS * windows.WINDOW_ITERATIONS})


@pytest.mark.parametrize(
    ("job", "seconds", "named"),
    [
        pytest.param(Job(), [(0.1, 0.1, 0.15, 0.1)], 2, id="one and a half times slower"),
        pytest.param(
            Job(), 5 * [(0.1, 0.1, 0.5, 0.1)] + [4 * (0.1,)], None, id="a good window between"
        ),
        pytest.param(Job(groups="aabb"), [(0.1, 0.1, 0.4, 0.4)], None, id="another stage"),
        pytest.param(
            Job({0: 0, 1: 0, 2: 1, 3: 1}), [(0.3, 0.3, 0.1, 0.1)], 0, id="roles of one node"
        ),
        pytest.param(Job(), [(0.001, 0.001, 0.004, 0.001)], None, id="noise"),
        pytest.param(Job(groups="abcd"), [(0.1, 0.2, 0.9, 0.1)], None, id="no peers elsewhere"),
    ],
)
def test_who_is_slow(job: Job, seconds: list[tuple[float, ...]], named: int | None) -> None:
    """``seconds``: of the roles, in each window, again and again."""
    told = [job.run(*seconds[n % len(seconds)]) for n in range(2 * windows.WINDOWS)]
    assert [one.node for window in told for one in window] == ([] if named is None else [named])


def test_a_new_epoch_begins_a_new_window_and_forgets_nodes_without_roles() -> None:
    job = Job()
    for _ in range(windows.WINDOWS):
        job.run(0.1, 0.1, 0.3, 0.1)
    assert set(job.watch.slow) == {2}
    job.epoch, job.nodes = 2, {0: 0, 1: 1, 2: 4, 3: 3}
    job.done = dict.fromkeys(range(4), windows.OwnTime(0, 0.0))
    assert job.look() == []
    assert not job.watch.slow
    job.run(0.1, 0.1, 0.1, 0.1)
    assert job.run(0.1, 0.1, 0.1, 0.1) == []


def seen(every: int, step: float, commit: float, fit: bool = True) -> windows.Stretch:
    """A long stretch in which copies take ``commit`` seconds and a step without waits ``step``."""
    iterations = every * max(windows.LEAST_ITERATIONS, int(windows.LEAST_SECONDS / step) + 1)
    stall = max(0.0, commit - every * step) * iterations / every
    window = every * step if fit else 0.0
    return windows.Stretch(iterations, iterations * step + stall, stall, commit * fit, window)


@given(STEPS, st.floats(0.01, 200.0), st.integers(1, 20), st.booleans())
def test_what_is_chosen_when_training_waits_has_room(
    step: float, commit: float, every: int, fit: bool
) -> None:
    stretch = seen(every, step, commit, fit)
    found = windows.denser_or_thinner(every, stretch, 0)
    if stretch.share <= 0.05:
        assert found == every
    elif found < 1000:
        assert found > every
        assert found * step >= commit
        assert seen(found, step, commit).share == 0
        assert (found - 1) * step <= 1.1 * commit + step or found == every + 1


@given(STEPS, st.floats(0.01, 200.0), st.integers(1, 30))
def test_it_settles(step: float, commit: float, every: int) -> None:
    """Up and down with the same facts: no second change leads back."""
    first = windows.denser_or_thinner(every, seen(every, step, commit), windows.CALM_STRETCHES)
    again = windows.denser_or_thinner(first, seen(first, step, commit), windows.CALM_STRETCHES)
    assert (again - first) * (first - every) >= 0 or again == first
    last = windows.denser_or_thinner(again, seen(again, step, commit), windows.CALM_STRETCHES)
    assert last == again


def test_it_becomes_denser_only_after_a_long_calm_and_with_figures() -> None:
    stretch = seen(8, 1.0, 2.0)
    assert windows.denser_or_thinner(8, stretch, windows.CALM_STRETCHES - 1) == 8
    assert windows.denser_or_thinner(8, stretch, windows.CALM_STRETCHES) == 4
    assert windows.denser_or_thinner(8, seen(8, 1.0, 2.0, fit=False), windows.CALM_STRETCHES) == 8


@pytest.mark.parametrize(("iterations", "seconds"), [(49, 100.0), (100, 29.0)])
def test_nothing_is_concluded_from_little(iterations: int, seconds: float) -> None:
    assert windows.denser_or_thinner(1, windows.Stretch(iterations, seconds, seconds / 2), 0) == 1


def run(
    meter: windows.StretchMeter, first: int, count: int, seconds: float, wait: float = 0.0
) -> None:
    """Iterations of two roles that wait side by side."""
    for iteration in range(first, first + count):
        meter.waited(EPOCH, iteration - 1, wait)
        meter.waited(EPOCH, iteration - 1, wait / 2)
        meter.shipped(EPOCH, 0, wait, 1.0)
        meter.shipped(EPOCH, 1, wait / 2, 1.0)
        meter.step(EPOCH, iteration, 1000.0 + iteration * seconds)


def test_the_first_iterations_of_an_epoch_do_not_count() -> None:
    """They wait for copies of what was restored."""
    meter = windows.StretchMeter()
    meter.step(EPOCH, 20, 100.0)
    meter.waited(EPOCH, 19, 60.0)
    meter.step(EPOCH, 21, 200.0)
    meter.waited(EPOCH, 20, 60.0)
    run(meter, 22, 52, seconds=1.0)
    assert meter.stretch().stall_seconds == 0
    meter.waited(EPOCH - 1, 40, 9.0)
    assert meter.stretch().stall_seconds == 0, "of an epoch that is closed"
