"""A node's cable is half cut, or cut for a moment: who is taken for lost, and that it stops.

Whole cuts and bad cables are in test_training.py.

The counting member trains nothing, but is committed over the network like any other, and its state
is known in advance for every iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deadpool_megatron.events import Kind
from tests.netns.lab.cluster import COUNTING_MEMBER, Cluster, Job, Obituary
from tests.netns.lab.hosts import Hosts

pytestmark = pytest.mark.netns
_VICTIM = 1
Measured = Callable[[str, str], None]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    job = Job((COUNTING_MEMBER, "--step-seconds", "0.05"), nodes=2, spares=1, preload="")
    with Hosts(3, tmp_path) as hosts, Cluster(hosts, tmp_path / "run", job) as built:
        built.wait_progress(5)
        yield built


def test_a_cut_as_long_as_the_fence_allows(cluster: Cluster, measured: Measured) -> None:
    cluster.hosts[_VICTIM].cut()
    time.sleep(2.7)  # so near to the limit of the fence that it may be reached on a busy machine
    cluster.hosts[_VICTIM].mend()
    cluster.wait_progress(20)
    recoveries = cluster.finish()["recoveries"]
    measured("cable cut for 2.7 s", f"{len(recoveries)} recoveries")
    assert len(recoveries) <= 1


@pytest.mark.parametrize("fault", ["mute", "deafen"])
def test_node_that_is_cut_off_stops_before_its_role_is_given_away(
    cluster: Cluster, measured: Measured, fault: str
) -> None:
    (member,) = [Obituary(pid) for pid in cluster.members(_VICTIM)]
    getattr(cluster.hosts.switch, fault)("host1")
    began = time.time()
    lost = cluster.wait_event(Kind.NODE_LOST)
    decided = cluster.wait_event(Kind.EPOCH_DECIDED, since=began)
    opened = cluster.wait_event(Kind.EPOCH_OPENED, since=began)
    assert lost.node == _VICTIM
    assert member.wall_seconds is not None, "its member still runs"
    assert member.wall_seconds < lost.wall_seconds < decided.wall_seconds
    assert "cut off" in cluster.output(_VICTIM)
    cluster.wait_progress()

    cluster.hosts.switch.clear()
    cluster.hosts.switch.mend("host1")
    mended = time.time()
    joined = cluster.wait_event(Kind.NODE_JOINED, since=mended)
    assert joined.node == 3
    assert joined.data["spare"]
    (recovery,) = cluster.finish()["recoveries"]
    assert recovery["seats_changed"][str(_VICTIM)][1][0] == 2
    measured(
        f"cable of a node: {fault}",
        f"members dead after {member.wall_seconds - began:.1f} s, taken for lost after"
        f" {lost.wall_seconds - began:.1f} s, training after {opened.wall_seconds - began:.1f} s;"
        f" a spare again {joined.wall_seconds - mended:.1f} s after the mend",
    )
