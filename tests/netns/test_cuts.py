"""Cables that are slow, half cut or cut for a moment, and what copies are marked with on them."""

import json
import sys
import time
from functools import partial

import pytest

from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import read_result
from deadpool_megatron.events import Kind
from tests.faults.harness import jobs, layouts
from tests.netns.lab.cluster import COUNTING_MEMBER, Cluster, Job, counting
from tests.netns.lab.hosts import Host, Hosts

pytestmark = pytest.mark.netns
_VICTIM = 1
_NODES, _ITERATIONS = 3, 8
_LAYOUT = jobs.Layout("dp3", f"{layouts.DISTRIBUTED} --global-batch-size 6", _NODES, 1)
_SETTINGS = (
    *(
        "--deadpool-copies",
        "2",
        "--deadpool-set",
        "dscp=8",
        "--deadpool-set",
        "rate-limit-gbps=0.2",
    ),
    *("--deadpool-interface", "eth0"),
    *("--deadpool-set", "hash-interval=1"),
)
# Class selector 1, and the priority of bulk traffic in the queues of this machine.
_RULES = {
    "marked": "ip dscp cs1",
    "marked and last in the queue": "ip dscp cs1 meta priority 0:2",
    "other": "ip dscp != cs1",
    "other class": "ip dscp != cs1 ip dscp != cs0",
}


@pytest.fixture
def cluster(tmp_path):
    with counting(tmp_path, spares=1) as running:
        yield running


def test_a_cut_as_long_as_the_fence_allows(cluster, measured):
    cluster.hosts[_VICTIM].cut()
    time.sleep(2.7)  # so near to the limit of the fence that it may be reached on a busy machine
    cluster.hosts[_VICTIM].mend()
    cluster.wait_progress(20)
    recoveries = cluster.finish()["recoveries"]
    measured("cable cut for 2.7 s", f"{len(recoveries)} recoveries")
    assert len(recoveries) <= 1


@pytest.mark.parametrize("fault", ["mute", "deafen"])
def test_node_that_is_cut_off_stops_before_its_role_is_given_away(cluster, measured, fault):
    switch = cluster.hosts.switch
    _, stopped = cluster.lost_in_time(_VICTIM, lambda: getattr(switch, fault)("host1"))
    assert [event.node for event in cluster.events(Kind.NODE_LOST)] == [_VICTIM]
    assert "cut off" in cluster.output(_VICTIM)
    cluster.wait_progress()

    switch.clear()
    joined, again = cluster.comes_back(lambda: switch.mend("host1"))
    assert joined.node == 3
    assert joined.data["spare"]
    (recovery,) = cluster.finish()["recoveries"]
    assert recovery["seats_changed"][str(_VICTIM)][1][0] == 2
    measured(f"cable of a node: {fault}", stopped + again)


def test_cut_of_a_cable_for_copies_costs_no_recovery(tmp_path, measured):
    """With four roles a node, the roles of a cut cable use the others until it is mended."""
    cables = [f"eth{number}" for number in range(4)]
    settings = ("--nproc-per-node", "4", "--deadpool-interface", ",".join(cables))
    job = Job((COUNTING_MEMBER, "--step-seconds", "0.05"), 2, 0, settings, "")
    with (
        Hosts(2, tmp_path, cables=4) as hosts,
        Cluster(hosts, tmp_path / "run", job) as cluster,
    ):

        def carried(iterations: int) -> list[int]:
            """Return the bytes that each cable of node 0 has carried since a beat of now."""
            counts = []
            for _ in range(2):
                cluster.wait_progress(iterations)
                command = (sys.executable, "-m", "deadpool_megatron", "status", "--json")
                found = json.loads(hosts[0].run(*command, str(cluster.run.path)).stdout)
                vault = found["nodes"]["0"]["vault"]
                counts.append([vault.get(f"bytes shipped over {name}", 0) for name in cables])
            return [after - before for before, after in zip(*counts, strict=True)]

        def wait_warning(text: str) -> None:
            logged = partial(cluster.events, Kind.LOG)
            cluster.wait_for(text, lambda: any(text in e.data["text"] for e in logged()))

        assert all(carried(40))
        began = time.time()
        hosts.switch.cut("host1-2")
        wait_warning("copies from eth2 (10.77.2.1) to node 1 (10.77.2.2) fail")
        without = carried(40)
        assert without[2] == 0
        assert all(without[:2] + without[3:])
        pause = cluster.longest_pause(began)
        hosts.switch.mend("host1-2")
        wait_warning("copies use eth2 (10.77.2.1)")
        assert all(carried(40))
        assert cluster.finish()["recoveries"] == []
    measured("one of four cables for copies cut", f"training paused for {pause:.1f} s, once")


def watch(host: Host) -> None:
    """Count what a host sends, by rule."""
    done = host.run("nft", "add table ip seen")
    assert done.returncode == 0, done.stderr
    hook = "{ type filter hook output priority 300; }"
    assert host.run("nft", f"add chain ip seen out {hook}").returncode == 0
    for name, rule in _RULES.items():
        done = host.run("nft", f'add rule ip seen out oifname eth0 {rule} counter comment "{name}"')
        assert done.returncode == 0, done.stderr


def seen(host: Host) -> dict[str, int]:
    """Bytes by rule."""
    listed = json.loads(host.run("nft", "-j", "list", "table", "ip", "seen").stdout)["nftables"]
    rules = [entry["rule"] for entry in listed if "rule" in entry]
    return {
        rule["comment"]: next(e["counter"]["bytes"] for e in rule["expr"] if "counter" in e)
        for rule in rules
    }


def test_copies_are_marked_and_nothing_else(tmp_path, measured):
    """Two copies each, under a limit: and the bits are those of a quiet run."""
    program = jobs.trainer(_LAYOUT, _ITERATIONS)
    wanted = jobs.undisturbed(program)
    job = Job(program.command, _NODES, 0, _SETTINGS)
    with Hosts(_NODES, tmp_path) as hosts:
        for host in hosts:
            watch(host)
        with Cluster(hosts, tmp_path / "run", job) as cluster:
            final = cluster.wait_end()
            assert final["exit_status"] == 0, final["reason"]
            commits = cluster.events(Kind.COMMITTED)
        found = [seen(host) for host in hosts]
    comparison = compare_results(read_result(wanted.directory), read_result(cluster.run.path))
    assert comparison.identical, "\n".join(map(str, comparison.differences))
    shipped = sum(event.data["bytes"] for event in commits)
    assert shipped > 0
    marked = sum(host["marked"] for host in found)
    assert shipped < marked  # every copy crosses one link; headers and answers come on top
    for host in found:
        # All hosts send copies and answer to them. The kernel's last word on a connection that
        # is closed has the class still, but no priority.
        assert host["marked"] >= host["marked and last in the queue"] > 0.99 * host["marked"]
        assert host["other"] > 0
        assert host["other class"] == 0
    measured("streaming: two copies", f"{marked / shipped:.3f} bytes sent for each")
