"""The life of the file of bad nodes, line by line: each thing that is asked, and its answer; see
lives/bad_nodes.txt."""

import json
import time
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory import bad_nodes
from deadpool_megatron.cluster.run_directory.bad_nodes import BadNode
from tests.cluster.run_directory.test_life import Told, written

_NOW = 1_000_000.0
_DAMAGED = (
    {"host": "x y"},
    {"host": "-x"},
    {"wall_seconds": -1},
    {"wall_seconds": "1"},
    {"wall_seconds": 1e12},
    {"wall_seconds": 0, "evidence": "a\nb" + 600 * "c", "alone": 0},
    {"run": None, "kind": 7},
)


def test_bad_nodes_are_known_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, runs = Told(tmp_path), tmp_path / "runs"
    runs.mkdir()
    monkeypatch.setattr(time, "localtime", time.gmtime)
    monkeypatch.setattr(time, "time", lambda: _NOW)
    told(bad_nodes.noted_against, "h1", runs, "own")
    told(bad_nodes.read_bad_nodes, runs)
    told(bad_nodes.forget_host, runs, "h1")
    told.tree(runs)
    for number in range(12):
        when = _NOW - 3600.0 * 10 * number
        bad = BadNode(f"h{number}", "device-error", when, "a", "Xid 79", alone=number != 1)
        told(bad_nodes.add_bad_node, runs, bad)
    told(bad_nodes.add_bad_node, runs, BadNode("h3", "left-out", _NOW, "b", "slow"))
    told(bad_nodes.add_bad_node, runs, BadNode("h3", "left-out", _NOW - 5.0, "b", "again"))
    told(bad_nodes.add_bad_node, runs, BadNode("h9", "left-out", _NOW - 7.0, "own", "hot"))
    for number in (0, 1, 3, 7, 8, 9):
        told(bad_nodes.noted_against, f"h{number}", runs, "own")
    told(bad_nodes.noted_against, "h3", runs, "b")
    told(bad_nodes.why_left_out, runs, "h0", "own", _NOW + 72 * 3600.0)
    told(bad_nodes.why_left_out, runs, "h0", "own", _NOW + 72 * 3600.0 + 1.0)
    for since, at_most in ((_NOW - 36000.0, 9), (0.0, 3)):
        recent = bad_nodes.recent_hosts(bad_nodes.read_bad_nodes(runs), since, at_most)
        told.note(f"since {since}, at most {at_most}: {recent}")
    for host in ("h3", "h3", "h0"):
        told(bad_nodes.forget_host, runs, host)
    told(bad_nodes.read_bad_nodes, runs)
    usual = {"host": "h", "kind": "k", "wall_seconds": 1.0, "run": "r", "evidence": "e"}
    for one in _DAMAGED:
        written(bad_nodes.bad_nodes_file(runs), json.dumps({"nodes": [{**usual, **one}]}))
        told(bad_nodes.read_bad_nodes, runs)
    for text in ("{}", '{"nodes": [{}]}'):
        written(bad_nodes.bad_nodes_file(runs), text)
        told(bad_nodes.noted_against, "h1", runs, "own")
        told(bad_nodes.add_bad_node, runs, bad)
        told.note(bad_nodes.bad_nodes_file(runs).read_text())
    told.note(capsys.readouterr().err.strip())
    told.compare("bad_nodes")
