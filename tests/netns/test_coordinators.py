"""The coordinator dies, with its host or alone, or is held up: the next one, just one, goes on. The
shared file system goes away, for one node or for all, with or without the network."""

import os
import signal
import time
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.events import Kind
from tests.netns.lab.cluster import counting

pytestmark = pytest.mark.netns
needs_fuse = pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs /dev/fuse")
_VICTIM = 1
# Longer than any limit of fence or takeover.
_GONE_SECONDS = 8.0
_SPARE_NODES = {2, 3}
# Half of the default: how long nodes may take to come to a new coordinator.
_SETTINGS = ("--deadpool-set", "rejoin-seconds=10")


@pytest.fixture
def cluster(tmp_path):
    with counting(tmp_path, _SETTINGS) as running:
        yield running


def test_run_survives_the_loss_of_successive_coordinators(cluster, measured):
    members = cluster.members_of_all()
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
    assert cluster.term().node in range(2), "both spares are gone"
    assert all(posix.is_alive(pid) for pid in members)
    assert cluster.epoch() == 1
    assert cluster.finish()["recoveries"] == []


@pytest.mark.parametrize("fault", ["mute", "deafen"])
def test_coordinator_is_cut_off_while_all_reach_the_journal(cluster, measured, fault):
    """Storage has a network of its own, so its heartbeat could continue: it must not."""
    members = cluster.members_of_all()
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


@needs_fuse
def test_journal_fails_for_all_nodes(cluster, measured):
    """Training needs no journal until something has to be decided; then it waits for it."""
    how = "fail"  # test_faults has it hang for all nodes, with everything else
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


@needs_fuse
def test_coordinator_alone_loses_the_run_directory(cluster, measured):
    how = "hang"
    members = cluster.members_of_all()
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


@needs_fuse
def test_node_without_network_and_journal_stops_in_time(cluster, measured):
    host = cluster.hosts[_VICTIM]

    def cut_off() -> None:
        host.hide(cluster.run.journal, "hang")
        host.cut()

    def mend() -> None:
        host.reveal(cluster.run.journal)
        host.mend()

    _, stopped = cluster.lost_in_time(_VICTIM, cut_off)
    assert "no coordinator and no journal" in cluster.output(_VICTIM)
    cluster.wait_progress(10)
    _, again = cluster.comes_back(mend)
    cluster.finish()
    measured("node without network and journal", stopped + again)
