"""The coordinator dies, with its host or alone, or is held up: the next one, just one, goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.events import Kind
from tests.netns.lab.cluster import COUNTING_MEMBER, Cluster, Job
from tests.netns.lab.hosts import Hosts

pytestmark = pytest.mark.netns
_NODES, _SPARES = 2, 2
_SPARE_NODES = {2, 3}
# Half of the default: how long nodes may take to come to a new coordinator.
_SETTINGS = ("--deadpool-set", "rejoin-seconds=10")
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


def test_one_host_of_a_coordinator_after_the_other(tmp_path: Path, measured: Measured) -> None:
    with running(tmp_path) as cluster:
        members = members_of(cluster)
        for term in (2, 3):
            node = cluster.term().node
            assert node in _SPARE_NODES, "no training node where there is a choice"
            cluster.coordinator_host().power_off()
            began = time.time()
            taken = cluster.wait_term(term)
            if term == 2:
                assert taken.node == (_SPARE_NODES - {node}).pop()
                assert cluster.wait_event(Kind.NODE_LOST, since=began).node == node
            cluster.wait_progress(10)
            measured(
                f"coordinator's host off, term {term - 1}",
                f"the next one after {taken.wall_seconds - began:.1f} s",
            )
        assert cluster.term().node in range(_NODES), "both spares are gone"
        assert all(posix.is_alive(pid) for pid in members)
        assert cluster.epoch() == 1
        assert cluster.finish()["recoveries"] == []


@pytest.mark.parametrize("fault", ["mute", "deafen"])
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
