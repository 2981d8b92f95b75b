"""The shared file system goes away, for one node or for all, with or without the network."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.events import Kind
from tests.netns.lab.cluster import COUNTING_MEMBER, Cluster, Job, Obituary
from tests.netns.lab.hosts import Hosts

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs /dev/fuse"),
]
_NODES, _SPARES, _VICTIM = 2, 2, 1
# Longer than any limit of fence or takeover.
_GONE_SECONDS = 8.0
Measured = Callable[[str, str], None]


@contextmanager
def running(tmp_path: Path) -> Iterator[Cluster]:
    job = Job((COUNTING_MEMBER, "--step-seconds", "0.05"), _NODES, _SPARES, preload="")
    with (
        Hosts(_NODES + _SPARES, tmp_path) as hosts,
        Cluster(hosts, tmp_path / "run", job) as cluster,
    ):
        cluster.wait_progress(5)
        cluster.wait_event(Kind.NODE_JOINED, count=_NODES + _SPARES)
        yield cluster


def test_nobody_reaches_the_journal(tmp_path: Path, measured: Measured) -> None:
    """Training needs no journal until something has to be decided; then it waits for it."""
    how = "fail"  # that it hangs for everybody, with all else, is in test_training
    with running(tmp_path) as cluster:
        for host in cluster.hosts:
            host.hide(cluster.run.journal, how)
        time.sleep(_GONE_SECONDS)
        cluster.wait_progress(20)
        assert cluster.events(Kind.NODE_LOST) == []
        (member,) = cluster.members(_VICTIM)
        os.kill(member, signal.SIGKILL)
        closed = cluster.wait_event(Kind.EPOCH_CLOSED)
        for host in cluster.hosts:
            host.reveal(cluster.run.journal)
        revealed = time.time()
        opened = cluster.wait_event(Kind.EPOCH_OPENED, since=revealed)
        assert opened.epoch == closed.epoch + 1
        cluster.wait_progress(20)
        (recovery,) = cluster.finish()["recoveries"]
        assert recovery["seats_changed"] == {"1": [[1, 0, 0], [1, 0, 1]]}
        assert cluster.events(Kind.NODE_LOST)[: -len(cluster.hosts)] == []
        measured(
            f"all nodes without journal ({how}) for {_GONE_SECONDS:g} s, then a member killed",
            "training goes on; after the kill it waits, and goes on"
            f" {opened.wall_seconds - revealed:.1f} s after the journal is back",
        )


def test_coordinator_alone_loses_the_run_directory(tmp_path: Path, measured: Measured) -> None:
    how = "hang"
    with running(tmp_path) as cluster:
        members = [pid for node in range(_NODES) for pid in cluster.members(node)]
        old = cluster.coordinator_pid()
        host = cluster.coordinator_host()
        host.hide(cluster.run.path, how)
        began = time.time()
        taken = cluster.wait_term(2)
        cluster.wait_progress(40)
        host.reveal(cluster.run.path)
        cluster.wait_for("the old coordinator's end", lambda: not posix.is_alive(old))
        cluster.wait_progress(20)
        assert all(posix.is_alive(pid) for pid in members)
        assert cluster.epoch() == 1
        assert cluster.finish()["recoveries"] == []
        measured(
            f"coordinator's host without the run directory ({how})",
            f"the next one after {taken.wall_seconds - began:.1f} s",
        )


def test_node_without_network_and_journal_stops_in_time(tmp_path: Path, measured: Measured) -> None:
    with running(tmp_path) as cluster:
        host = cluster.hosts[_VICTIM]
        (member,) = [Obituary(pid) for pid in cluster.members(_VICTIM)]
        host.hide(cluster.run.journal, "hang")
        host.cut()
        began = time.time()
        lost = cluster.wait_event(Kind.NODE_LOST)
        decided = cluster.wait_event(Kind.EPOCH_DECIDED, since=began)
        assert member.wall_seconds is not None, "its member still runs"
        assert member.wall_seconds < lost.wall_seconds < decided.wall_seconds
        assert "no coordinator and no journal" in cluster.output(_VICTIM)
        cluster.wait_progress(10)
        host.reveal(cluster.run.journal)
        host.mend()
        mended = time.time()
        joined = cluster.wait_event(Kind.NODE_JOINED, since=mended)
        cluster.finish()
        measured(
            "node without network and journal",
            f"members dead after {member.wall_seconds - began:.1f} s, taken for lost after"
            f" {lost.wall_seconds - began:.1f} s; a spare again"
            f" {joined.wall_seconds - mended:.1f} s after both are back",
        )
