"""Who is slow, from what roles need of their own."""

from __future__ import annotations

from collections.abc import Mapping

from deadpool_megatron.cluster.watch.slowness import (
    WINDOW_ITERATIONS,
    OwnTime,
    Player,
    Slowness,
    SlownessWatch,
)


class Job:
    """Four roles, one on each node, unless told; ``run`` lets a window go by."""

    def __init__(self, nodes: Mapping[int, int] | None = None, groups: str = "aaaa") -> None:
        self.watch = SlownessWatch(1.5)
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


def test_a_slow_node_is_told_once_after_two_windows_and_once_when_it_is_over() -> None:
    job = Job()
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
    for _ in range(2 * WINDOW_ITERATIONS - 1):
        assert job.run(0.1, 0.1, 0.9, 0.1, iterations=1) == []
    assert job.run(0.1, 0.1, 0.9, 0.1, iterations=1)


def test_one_slow_window_between_good_ones_is_not_a_slow_node() -> None:
    job = Job()
    for _ in range(4):
        assert job.run(0.1, 0.1, 0.5, 0.1) == []
        assert job.run(0.1, 0.1, 0.1, 0.1) == []


def test_stages_of_the_pipeline_are_not_compared_with_each_other() -> None:
    job = Job(groups="aabb")
    for _ in range(3):
        assert job.run(0.1, 0.1, 0.4, 0.4) == []


def test_roles_of_one_node_are_no_peers_of_each_other() -> None:
    job = Job(nodes={0: 0, 1: 0, 2: 1, 3: 1})
    job.run(0.3, 0.3, 0.1, 0.1)
    (verdict,) = job.run(0.3, 0.3, 0.1, 0.1)
    assert verdict.node == 0


def test_differences_of_a_few_milliseconds_are_noise() -> None:
    job = Job()
    for _ in range(3):
        assert job.run(0.001, 0.001, 0.004, 0.001) == []


def test_a_new_epoch_begins_a_new_window_and_forgets_nodes_without_roles() -> None:
    job = Job()
    job.run(0.1, 0.1, 0.3, 0.1)
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
    for _ in range(3):
        assert job.run(0.1, 0.2, 0.9, 0.1) == []
