"""Real training over real sockets through chains of faults ends in the bits of a quiet run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import read_result
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.events import Kind
from tests.faults.harness import jobs, layouts
from tests.netns.lab import disk, paced
from tests.netns.lab.cluster import Cluster, Job
from tests.netns.lab.hosts import Hosts

pytestmark = pytest.mark.netns
_NODES, _SPARES = 4, 2
_ITERATIONS = 50
# Of the 3.2 s after which a node that is cut off ends its members, retries take the rest.
_CUT_SECONDS = 1.5
_SETTINGS = ("--deadpool-set", "hash-interval=1", "--deadpool-set", "rejoin-seconds=10")


@contextmanager
def training(tmp_path: Path, pause_seconds: float = 0.1) -> Iterator[Cluster]:
    """Six hosts; at the end the run has ended well and exact. ``pause_seconds``: before each step,
    so that training lasts for as long as the faults do, however quick the machine is.
    """
    program = jobs.trainer(layouts.PP2_DP2, _ITERATIONS)
    wanted = jobs.undisturbed(program)
    command = ("-m", paced.__name__, *program.command[2:])
    job = Job(command, _NODES, _SPARES, _SETTINGS)
    with (
        Hosts(_NODES + _SPARES, tmp_path) as hosts,
        Cluster(hosts, tmp_path / "run", job, (), {paced.VARIABLE: str(pause_seconds)}) as cluster,
    ):
        cluster.wait_progress(3)
        cluster.wait_event(Kind.NODE_JOINED, count=_NODES + _SPARES)
        yield cluster
        final = cluster.wait_end()
        assert final["exit_status"] == 0, final["reason"]
        comparison = compare_results(read_result(wanted.directory), read_result(cluster.run.path))
        assert comparison.identical, "\n".join(map(str, comparison.differences))
        assert comparison.compared["hashes"] >= _NODES


def test_run_does_not_react_to_harmless_faults(tmp_path, measured):
    with training(tmp_path) as cluster:
        hosts = cluster.hosts
        cluster.wait_progress(5)
        hosts[1].cut()
        time.sleep(_CUT_SECONDS)
        hosts[1].mend()
        mended = time.time()
        cluster.wait_progress()
        measured("training: cable cut for 1.5 s", f"a step after {time.time() - mended:.1f} s")
        assert hosts[2].reset_connections(cluster.coordinator_host(), cluster.term().port) == 1
        cluster.wait_progress(3)
        hosts.switch.lose("host3", 2)
        cluster.wait_progress(5)
        hosts.switch.clear()
        hosts.switch.slow("host0", 0.1)
        cluster.wait_progress()
        began = time.time()
        cluster.wait_progress(2)
        measured("training: round trip of 200 ms", f"{(time.time() - began) / 2:.1f} s a step")
        hosts.switch.hasten("host0")
        cluster.wait_progress(3)
        assert cluster.epoch() == 1
        assert cluster.events(Kind.NODE_LOST) == []
        assert cluster.term().number == 1


@pytest.mark.skipif(not Path("/dev/fuse").exists(), reason="needs /dev/fuse")
@pytest.mark.skipif(bool(disk.missing()), reason=disk.missing())
@pytest.mark.parametrize(
    ("gone_seconds", "step_seconds"),
    # Longer than any limit of fence or takeover, and than a new coordinator waits for nodes.
    [(20.0, 0.6), pytest.param(60.0, 1.6, marks=pytest.mark.exhaustive)],
)
def test_training_continues_while_the_run_directory_hangs(
    gone_seconds, step_seconds, tmp_path, measured
):
    """Open files hang, too. No node is fenced, and no coordinator takes over."""
    with disk.mounted(tmp_path) as shared, training(shared.path, step_seconds) as cluster:
        members = cluster.members_of_all()
        began = time.time()
        for host in cluster.hosts:
            host.hide(cluster.run.path, "hang")
        with shared.standing_still():
            time.sleep(gone_seconds)
        for host in cluster.hosts:
            host.reveal(cluster.run.path)
        cluster.wait_progress(3)
        pause = cluster.longest_pause(began)
        assert all(posix.is_alive(pid) for pid in members)
        assert cluster.epoch() == 1
        assert cluster.events(Kind.NODE_LOST) == []
        assert cluster.term().number == 1
        assert pause < gone_seconds / 2, "training went on meanwhile"
        measured(
            f"training: the run directory hangs for everybody for {gone_seconds:g} s",
            f"no takeover, no new epoch; longest pause between two steps {pause:.1f} s",
        )


def test_coordinator_is_lost_then_a_node_is_cut_off(tmp_path, measured):
    with training(tmp_path, 0.4) as cluster:
        cluster.coordinator_host().power_off()
        began = time.time()
        taken = cluster.wait_term(2)
        before = cluster.wait_progress(10)
        assert cluster.epoch() == 1
        measured(
            "training: coordinator's host (a spare) off",
            f"the next one after {taken.wall_seconds - began:.1f} s, longest pause between two"
            f" steps {cluster.longest_pause(began):.1f} s",
        )
        host = cluster.hosts[1]
        began, stopped = cluster.lost_in_time(1, host.cut)
        assert cluster.newest_iteration() >= before
        cut_seconds = time.time() - began
        joined, again = cluster.comes_back(host.mend)
        assert joined.data["spare"]
        measured(f"training: cable of a node cut for {cut_seconds:.0f} s", stopped + again)
