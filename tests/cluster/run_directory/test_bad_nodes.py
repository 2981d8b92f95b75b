"""The hosts that runs have put aside: kept beside the runs, bounded, believed only if ours."""

import fcntl
import time
from dataclasses import replace
from socket import gethostname

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cluster.run_directory import bad_nodes, bad_nodes as quarantine

NODE = quarantine.BadNode("node7", "device-error", 100.0, "0a0a0a0a", "Xid 79")


def test_locked_file_is_given_up_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr(bad_nodes, "_LOCK_SECONDS", 0.1)
    with open(tmp_path / ".bad-nodes.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another run has been writing it"):
            quarantine.add_bad_node(tmp_path, NODE)
        assert cli.main(["bad-nodes", "--forget", "node7", str(tmp_path)]) == 2
    quarantine.add_bad_node(tmp_path, NODE)


def test_quarantined_host_is_excluded_until_it_is_forgotten(tmp_path):
    """Not by the run itself, nor for a host of which only one of several nodes failed."""
    quarantine.add_bad_node(tmp_path, NODE)
    quarantine.add_bad_node(tmp_path, replace(NODE, host="node8", alone=False))
    now = NODE.wall_seconds + 3600.0
    reason = quarantine.exclusion_reason(tmp_path, "node7", "another", now)
    assert reason.startswith("run 0a0a0a0a quarantined node7 on ")
    assert "(device-error: Xid 79)" in reason
    assert f"'deadpool bad-nodes --forget node7 {tmp_path}'" in reason
    for host, run, when in (
        ("node7", NODE.run, now),
        ("node8", "another", now),
        ("node9", "another", now),
        ("node7", "another", now + 80 * 3600.0),
    ):
        assert quarantine.exclusion_reason(tmp_path, host, run, when) == ""
    assert cli.main(["bad-nodes", "--forget", "node7", str(tmp_path)]) == 0
    assert quarantine.exclusion_reason(tmp_path, "node7", "another", now) == ""
    assert [node.host for node in quarantine.read_bad_nodes(tmp_path)] == ["node8"]


def test_run_on_a_bad_host_is_refused_before_it_starts(tmp_path, capsys):
    quarantine.add_bad_node(tmp_path, replace(NODE, host=gethostname(), wall_seconds=time.time()))
    run = tmp_path / "run"
    size = ("--nodes", "2", "--nproc-per-node", "1", "--preload", "")
    start = ["run", "--run-dir", str(run), *size, "--", "-m", "json.tool"]
    assert cli.main(start) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "run 0a0a0a0a quarantined " in line
    assert not run.exists()
    assert cli.main(["check", "--runs", str(tmp_path)]) == 1
    assert "problem: run 0a0a0a0a quarantined " in capsys.readouterr().out
