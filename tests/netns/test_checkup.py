"""Links between real hosts are tried before the first epoch: who is slow waits, who is parted from
others is left out, and the run begins without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.events import Kind
from tests.netns.lab.cluster import COUNTING_MEMBER, PATIENCE_SECONDS, Cluster, Job
from tests.netns.lab.hosts import Host, Hosts

pytestmark = pytest.mark.netns


def throttle(host: Host) -> None:
    """Let the card send a hundredth of what the busiest machine can."""
    rule = "oifname eth0 limit rate over 200 kbytes/second burst 64 kbytes drop"
    hook = "{ type filter hook output priority 0; }"
    for command in (
        "add table ip slow",
        f"add chain ip slow out {hook}",
        f"add rule ip slow out {rule}",
    ):
        done = host.run("nft", command)
        assert done.returncode == 0, done.stderr


def test_bad_links_cost_their_nodes_the_roles(tmp_path: Path) -> None:
    settings = ("--deadpool-check", "links", "--deadpool-connect-seconds", "3")
    job = Job((COUNTING_MEMBER, "--step-seconds", "0.05"), 2, 3, settings, preload="")
    with Hosts(5, tmp_path) as hosts:
        throttle(hosts[0])
        hosts.switch.part("host1", "host3")
        hosts.switch.part("host1", "host4")
        cluster = Cluster(hosts, tmp_path / "run", job)
        try:
            for node in range(5):
                # Whoever coordinates is reached by all.
                cluster.start(node, *(() if node == 2 else ("--no-standby",)))
            cluster.wait_progress(3)
            found = {event.node: event.data for event in cluster.events(Kind.NODE_JUDGED)}
            assert (found[0]["standing"], found[1]["standing"]) == ("weak", "left out")
            assert "its link carries 0.00 GB/s" in found[0]["reasons"][0]
            assert "no connection with 2 of 4 nodes, one is node 3" in found[1]["reasons"][0]
            assert not {seat.node for seat in cluster.record().seats.values()} & {0, 1}
            assert cluster.agents[1].wait(PATIENCE_SECONDS) == 69
            assert "left out: no connection" in cluster.output(1)
            assert cluster.finish()["recoveries"] == []
        except BaseException:
            cluster.show()
            raise
