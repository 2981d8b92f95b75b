"""Who is slow, from what roles need of their own."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from deadpool_megatron.cluster.watch.slowness import (
    WINDOW_ITERATIONS,
    WINDOWS,
    OwnTime,
    Player,
    Slowness,
    SlownessWatch,
)
from deadpool_megatron.settings import Settings


class Job:
    """Four roles, one on each node, unless told; ``run`` lets a window go by."""

    def __init__(self, nodes: Mapping[int, int] | None = None, groups: str = "aaaa") -> None:
        self.watch = SlownessWatch(Settings().slow_factor)
        self.nodes = nodes or {role: role for role in range(4)}
        self.peers = [tuple(r for r in range(4) if groups[r] == own) for own in groups]
        self.done = dict.fromkeys(self.nodes, OwnTime(0, 0.0))
        self.epoch = 1
        self.look()

    def look(self) -> list[Slowness]:
        players = {
            role: Player(node, self.peers[role], self.done[role])
            for role, node in self.nodes.items()
        }
        return self.watch.look(self.epoch, players)

    def run(self, *seconds: float, iterations: int = WINDOW_ITERATIONS) -> list[Slowness]:
        for role, each in enumerate(seconds):
            before = self.done[role]
            total = before.seconds + each * iterations
            self.done[role] = OwnTime(before.iterations + iterations, total)
        return self.look()


def test_a_slow_node_is_told_once_after_enough_windows_and_once_when_it_is_over() -> None:
    job = Job()
    for _ in range(WINDOWS - 1):
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


def test_a_node_that_is_one_and_a_half_times_slower_is_told_with_the_default_settings() -> None:
    job = Job()
    for _ in range(WINDOWS - 1):
        assert job.run(0.1, 0.1, 0.15, 0.1) == []
    (verdict,) = job.run(0.1, 0.1, 0.15, 0.1)
    assert verdict.node == 2


def test_no_verdict_before_a_window_is_full() -> None:
    job = Job()
    for _ in range(WINDOWS * WINDOW_ITERATIONS - 1):
        assert job.run(0.1, 0.1, 0.9, 0.1, iterations=1) == []
    assert job.run(0.1, 0.1, 0.9, 0.1, iterations=1)


def test_slow_windows_with_a_good_one_between_are_not_a_slow_node() -> None:
    job = Job()
    for _ in range(3):
        for _ in range(WINDOWS - 1):
            assert job.run(0.1, 0.1, 0.5, 0.1) == []
        assert job.run(0.1, 0.1, 0.1, 0.1) == []


@pytest.mark.slow
@pytest.mark.parametrize("slow", [None, 5])
def test_an_hour_of_noise_names_nobody_but_the_node_that_is_slow(slow: int | None) -> None:
    """Sixteen nodes with iterations of half a second. Every hundredth one of each node has a pause:
    mostly of a whole iteration, now and then of fifty of them.
    """
    noise, roles = random.Random(1), range(16)
    watch, totals = SlownessWatch(Settings().slow_factor), [0.0 for _ in roles]
    named: dict[int, int] = {}
    for iteration in range(7200):
        players = {r: Player(r, (*roles,), OwnTime(iteration, totals[r])) for r in roles}
        for verdict in watch.look(1, players):
            named.setdefault(verdict.node, iteration)
        for role in roles:
            usual = noise.lognormvariate(0.0, 0.1) * (1.5 if role == slow else 1.0)
            pause = min(50.0, noise.paretovariate(1.2)) if noise.random() < 0.01 else 0.0
            totals[role] += 0.5 * (usual + pause)
    assert named == ({} if slow is None else {slow: WINDOWS * WINDOW_ITERATIONS})


def test_stages_of_the_pipeline_are_not_compared_with_each_other() -> None:
    job = Job(groups="aabb")
    for _ in range(WINDOWS + 1):
        assert job.run(0.1, 0.1, 0.4, 0.4) == []


def test_roles_of_one_node_are_no_peers_of_each_other() -> None:
    job = Job(nodes={0: 0, 1: 0, 2: 1, 3: 1})
    for _ in range(WINDOWS - 1):
        job.run(0.3, 0.3, 0.1, 0.1)
    (verdict,) = job.run(0.3, 0.3, 0.1, 0.1)
    assert verdict.node == 0


def test_differences_of_a_few_milliseconds_are_noise() -> None:
    job = Job()
    for _ in range(WINDOWS + 1):
        assert job.run(0.001, 0.001, 0.004, 0.001) == []


def test_a_new_epoch_begins_a_new_window_and_forgets_nodes_without_roles() -> None:
    job = Job()
    for _ in range(WINDOWS):
        job.run(0.1, 0.1, 0.3, 0.1)
    assert set(job.watch.slow) == {2}
    job.epoch, job.nodes = 2, {0: 0, 1: 1, 2: 4, 3: 3}
    job.done = dict.fromkeys(range(4), OwnTime(0, 0.0))
    assert job.look() == []
    assert not job.watch.slow
    job.run(0.1, 0.1, 0.1, 0.1)
    assert job.run(0.1, 0.1, 0.1, 0.1) == []


def test_roles_without_peers_elsewhere_are_not_judged() -> None:
    job = Job(groups="abcd")
    for _ in range(WINDOWS + 1):
        assert job.run(0.1, 0.2, 0.9, 0.1) == []
