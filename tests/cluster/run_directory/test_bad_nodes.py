"""The hosts that runs have put aside: kept beside the runs, bounded, believed only if ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator.reporting.bad_nodes import is_bad
from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.run_directory import bad_nodes
from deadpool_megatron.cluster.run_directory.bad_nodes import (
    BadNode,
    add_bad_node,
    read_bad_nodes,
    recent_hosts,
)
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.ownership import OwnershipError

NODE = BadNode("node7", "device-error", 100.0, "0a0a0a0a", "Xid 79")


def test_a_host_is_kept_once_for_each_run_and_the_oldest_make_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_nodes, "_MOST_KEPT", 2)
    assert read_bad_nodes(tmp_path) == []
    assert add_bad_node(tmp_path, NODE)
    assert not add_bad_node(tmp_path, replace(NODE, wall_seconds=200.0))
    others = [replace(NODE, host=host) for host in ("node8", "node9")]
    assert all(add_bad_node(tmp_path, other) for other in others)
    assert read_bad_nodes(tmp_path) == others


def test_a_file_that_others_could_have_written_or_that_is_damaged_is_refused(
    tmp_path: Path,
) -> None:
    add_bad_node(tmp_path, NODE)
    file = bad_nodes.bad_nodes_file(tmp_path)
    file.write_text(file.read_text().replace("node7", "node7,x y"))
    with pytest.raises(ValueError, match="is no name of a host"):
        read_bad_nodes(tmp_path)
    file.chmod(0o666)
    with pytest.raises(OwnershipError):
        read_bad_nodes(tmp_path)
    with pytest.raises(OwnershipError):
        add_bad_node(tmp_path, NODE)


def test_old_ones_are_used_again_and_never_too_many_are_left_out() -> None:
    known = [replace(NODE, host=f"node{n}", wall_seconds=100.0 * n) for n in (4, 1, 2, 3)]
    again = replace(NODE, host="node1", wall_seconds=350.0)
    assert recent_hosts([*known, again], 250.0, 9) == ["node1", "node3", "node4"]
    assert recent_hosts([*known, again], 250.0, 2) == ["node1", "node4"]


def test_a_lost_connection_or_a_drain_says_nothing_of_the_host() -> None:
    bad = {
        kind
        for kind in FailureKind
        if is_bad(Event(Kind.NODE_LOST, node=1, data={"kind": str(kind), "cause": ""}))
    }
    assert {FailureKind.DEVICE_ERROR, FailureKind.LEFT_OUT, FailureKind.NODE_FROZEN} <= bad
    assert not bad & {FailureKind.NODE_LOST, FailureKind.DRAINED, FailureKind.PROCESS_CRASH}
