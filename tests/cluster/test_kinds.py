"""Whole runs of the counting member: each kind of failure is noticed, named and acted upon."""

import json
import signal
from socket import gethostname
from typing import Any

import pytest

from deadpool_megatron.cluster.run_directory.bad_nodes import read_bad_nodes
from deadpool_megatron.events import Kind
from tests.cluster.runs import Run, deadpool, send

pytestmark = pytest.mark.slow


def kinds_of(final: dict[str, Any]) -> list[str]:
    return [recovery["kind"] for recovery in final["recoveries"]]


def test_crash_by_a_signal_is_reported_with_its_last_output(tmp_path):
    with Run(tmp_path / "r", spares=0) as run:
        run.wait_iteration(3)
        send(run.listing(1)["members"]["0"], signal.SIGSEGV)
        lost = run.wait_event(Kind.MEMBER_LOST)
        final = run.finish()
    assert lost.data["kind"] == "process-crash"
    assert "Fatal Python error: Segmentation fault" in lost.data["cause"]
    assert kinds_of(final) == ["process-crash"]


def test_a_drain_waits_where_only_a_quarantined_node_is_left(tmp_path):
    with Run(tmp_path / "r") as run:
        where = str(run.run.path)
        for number in range(1, 4):
            run.wait_iteration(run.newest_iteration() + 2)
            assert deadpool("kill", where, "--role", "1").returncode == 0
            run.wait_event(Kind.RECOVERED, number)
        assert run.wait_event(Kind.NODE_QUARANTINED).node == 1
        asked = deadpool("drain", where, "--node", "0", "--wait", "3")
        assert "waits for a spare node that is not quarantined, as nodes [1] are" in asked.stderr
        status = json.loads(deadpool("status", where, "--json").stdout)
        uses = [status["nodes"][node]["use"] for node in "012"]
        final = run.finish()
    assert uses == ["training", "quarantined", "training"]
    assert kinds_of(final) == ["process-crash"] * 3


@pytest.mark.full
@pytest.mark.parametrize("error", ["device", ""])
def test_training_node_is_checked_after_a_device_error_and_each_minute(error, tmp_path):
    """A process would start again in place; the site's own check knows better."""
    sick = tmp_path / "sick"
    # Each node has a file of its own for the output of the check.
    where = "test ! -e {} || case $(readlink /proc/$PPID/fd/1) in *node1/*) {} ;; esac"
    command = where.format(sick, "echo row remapping failed; exit 2")
    notices = tmp_path / "notices"
    notify = f'echo "$DEADPOOL_EVENT_KIND" >> {notices}'
    options = ("--deadpool-health-command", command, "--deadpool-on-event", notify)
    misbehave = ("--misbehave", error) if error else ()
    with Run(tmp_path / "r", *misbehave, options=options) as run:
        run.wait_event(Kind.EPOCH_OPENED)
        sick.touch()  # the spare was asked when it joined, and is again in a minute
        quarantined = run.wait_event(Kind.NODE_QUARANTINED)
        assert quarantined.node == 1
        assert quarantined.data["cause"].endswith("its health command says: row remapping failed")
        run.wait_event(Kind.RECOVERED, 2 if error else 1)
        final = run.finish()
    assert kinds_of(final) == ["device-error", "planned"][not error :]
    assert final["recoveries"][-1]["seats_changed"]["1"][1][0] == 2
    assert final["recoveries"][-1]["steps_recomputed"] == 0
    # The next run leaves the host out, and the site was notified once.
    (bad,) = read_bad_nodes(tmp_path)
    assert (bad.host, bad.kind, bad.run) == (gethostname(), "device-error", final["run_id"])
    assert bad.evidence == quarantined.data["cause"]
    assert notices.read_text().splitlines().count("node-quarantined") == 1
    assert deadpool("bad-nodes", "--names", str(tmp_path)).stdout == f"{bad.host}\n"
