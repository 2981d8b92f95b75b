"""The coordinator dies, with its host or alone, or is held up: the next one, just one, goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.events import Kind
from tests.netns.cluster import COUNTING_MEMBER, Cluster, Job
from tests.netns.hosts import Hosts

pytestmark = pytest.mark.netns
_NODES, _SPARES = 2, 2
_HELD_SECONDS = 15.0
# Half of the default: how long nodes may take to come to a new coordinator.
_SETTINGS = ("--deadpool-rejoin-seconds", "10")
Measured = Callable[[str, str], None]


@contextmanager
def running(tmp_path: Path, faults: Sequence[dict[str, Any]] = ()) -> Iterator[Cluster]:
    job = Job((COUNTING_MEMBER, "--step-seconds", "0.05"), _NODES, _SPARES, _SETTINGS, "")
    with (
        Hosts(_NODES + _SPARES, tmp_path) as hosts,
        Cluster(hosts, tmp_path / "run", job, faults) as cluster,
    ):
        cluster.wait_progress(5)
        # A spare that joined late is in no record yet; then nobody's loss would be missed.
        cluster.wait_event(Kind.NODE_JOINED, count=_NODES + _SPARES)
        yield cluster


def members_of(cluster: Cluster) -> list[int]:
    return [pid for node in range(_NODES) for pid in cluster.members(node)]


def test_coordinator_killed_alone(tmp_path: Path, measured: Measured) -> None:
    with running(tmp_path) as cluster:
        members = members_of(cluster)
        os.kill(cluster.coordinator_pid(), signal.SIGKILL)
        began = time.time()
        taken = cluster.wait_term(2)
        cluster.wait_progress(40)
        assert all(posix.is_alive(pid) for pid in members)
        assert cluster.epoch() == 1
        assert cluster.finish()["recoveries"] == []
        measured(
            "coordinator process killed",
            f"the next one after {taken.wall_seconds - began:.1f} s, longest pause of training"
            f" {cluster.longest_pause(began):.1f} s",
        )


def test_host_of_the_coordinator_is_switched_off(tmp_path: Path, measured: Measured) -> None:
    with running(tmp_path) as cluster:
        members = members_of(cluster)
        node = cluster.term().node
        assert node is not None
        assert node >= _NODES, "the coordinator is on no training node where there is a choice"
        cluster.coordinator_host().power_off()
        began = time.time()
        taken = cluster.wait_term(2)
        assert taken.node == ({2, 3} - {node}).pop()
        lost = cluster.wait_event(Kind.NODE_LOST, since=began)
        assert lost.node == node
        cluster.wait_progress(20)
        assert all(posix.is_alive(pid) for pid in members)
        assert cluster.epoch() == 1
        assert cluster.finish()["recoveries"] == []
        measured(
            "coordinator's host (a spare) off",
            f"the next one after {taken.wall_seconds - began:.1f} s, longest pause of training"
            f" {cluster.longest_pause(began):.1f} s",
        )


def test_host_of_the_coordinator_and_a_training_node_are_switched_off(
    tmp_path: Path, measured: Measured
) -> None:
    with running(tmp_path) as cluster:
        cluster.coordinator_host().power_off()
        cluster.hosts[0].power_off()
        began = time.time()
        taken = cluster.wait_term(2)
        opened = cluster.wait_event(Kind.EPOCH_OPENED, since=began)
        cluster.wait_progress(5)
        (recovery,) = cluster.finish()["recoveries"]
        assert recovery["steps_recomputed"] <= 1
        measured(
            "coordinator's host and a training node off",
            f"the next one after {taken.wall_seconds - began:.1f} s, training after"
            f" {opened.wall_seconds - began:.1f} s",
        )


def test_one_host_of_a_coordinator_after_the_other(tmp_path: Path, measured: Measured) -> None:
    with running(tmp_path) as cluster:
        for term in (2, 3):
            cluster.coordinator_host().power_off()
            began = time.time()
            taken = cluster.wait_term(term)
            cluster.wait_progress(10)
            measured(
                f"coordinator's host off, term {term - 1}",
                f"the next one after {taken.wall_seconds - began:.1f} s",
            )
        assert cluster.term().node in range(_NODES), "both spares are gone"
        cluster.finish()


def test_standbys_that_claim_at_the_same_time(tmp_path: Path) -> None:
    stop = {"point": "standby.claim", "signal": "STOP"}
    nodes = range(_NODES + _SPARES)
    faults = [{"id": f"n{node}", "match": {"node": node, "term": 2}, **stop} for node in nodes]
    with running(tmp_path, faults) as cluster:
        os.kill(cluster.coordinator_pid(), signal.SIGKILL)
        markers = [cluster.faults_fired / str(fault["id"]) for fault in faults]

        def stopped() -> list[int]:
            return [pid for marker in markers if (pid := cluster.stopped_at(marker))]

        # Not for all four: a node whose standby does not look for long fences itself.
        cluster.wait_for("two at the point", lambda: len(stopped()) >= 2)

        def goes_on() -> bool:
            for pid in stopped():
                os.kill(pid, signal.SIGCONT)
            return cluster.term().number == 2

        cluster.wait_for("a claim", goes_on)
        cluster.wait_for("nobody left at the point", lambda: goes_on() and not stopped())
        cluster.wait_term(2)
        cluster.wait_progress(20)
        assert cluster.epoch() == 1
        cluster.finish()
        assert cluster.term().number == 2
        assert len(cluster.events(Kind.COORDINATOR)) == 2


def test_coordinator_that_was_held_up_steps_down(tmp_path: Path, measured: Measured) -> None:
    with running(tmp_path) as cluster:
        old, node = cluster.coordinator_pid(), cluster.term().node
        os.kill(old, signal.SIGSTOP)
        began = time.time()
        taken = cluster.wait_term(2)
        time.sleep(max(0.0, began + _HELD_SECONDS - time.time()))
        woken = time.time()
        os.kill(old, signal.SIGCONT)
        cluster.wait_for("the old coordinator's end", lambda: not posix.is_alive(old))
        cluster.wait_progress(20)
        assert cluster.term().number == 2
        assert cluster.epoch() == 1
        assert cluster.events(Kind.NODE_LOST) == []
        log = cluster.run.log(f"node{node}-standby")
        cluster.wait_for("its last words", log.exists)
        assert "coordinator of term 1 steps down" in log.read_text()
        assert not [e for e in cluster.first_term() if e.wall_seconds > woken]
        assert cluster.finish()["recoveries"] == []
        measured(
            "coordinator process held for 15 s",
            f"the next one after {taken.wall_seconds - began:.1f} s, longest pause of training"
            f" {cluster.longest_pause(began):.1f} s",
        )


@pytest.mark.parametrize("fault", ["cut", "mute", "deafen"])
def test_coordinator_is_cut_off_while_all_reach_the_journal(
    tmp_path: Path, measured: Measured, fault: str
) -> None:
    """Storage has a network of its own, so its sign of life could go on: it must not."""
    with running(tmp_path) as cluster:
        members = members_of(cluster)
        host = cluster.coordinator_host()
        getattr(cluster.hosts.switch, fault)(host.name)
        began = time.time()
        taken = cluster.wait_term(2)
        cluster.wait_progress(20)
        time.sleep(max(0.0, began + 20 - time.time()))
        cluster.hosts.switch.clear()
        host.mend()
        cluster.wait_progress(20)
        assert all(posix.is_alive(pid) for pid in members)
        assert cluster.term().number == 2
        assert cluster.epoch() == 1
        assert cluster.finish()["recoveries"] == []
        measured(
            f"cable of the coordinator's host for 20 s: {fault}",
            f"the next one after {taken.wall_seconds - began:.1f} s, longest pause of training"
            f" {cluster.longest_pause(began):.1f} s",
        )
