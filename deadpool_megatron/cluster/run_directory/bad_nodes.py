"""The file of bad nodes beside the runs: which hosts a run has put aside, when and why.

It belongs to no single run: each run in the same directory adds to it, and whoever starts the next
one leaves these hosts out. Those who train never read it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron import ownership
from deadpool_megatron.cluster.run_directory.directory import write_json

# Names end up in the options of other programs.
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_MOST_KEPT = 1000
_MOST_EVIDENCE_CHARACTERS = 500


@dataclass(frozen=True)
class BadNode:
    """One host that one run has put aside. ``kind``: of failure; ``evidence``: one line."""

    host: str
    kind: str
    wall_seconds: float
    run: str
    evidence: str

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> BadNode:
        """Raises KeyError, TypeError or ValueError for anything that is no such thing."""
        if not HOST.fullmatch(host := str(values["host"])):
            raise ValueError(f"{host!r} is no name of a host")
        kind, run, evidence = (str(values[name]) for name in ("kind", "run", "evidence"))
        shown = "".join(c if c.isprintable() else "?" for c in evidence)
        when = float(values["wall_seconds"])
        return BadNode(host, kind, when, run, shown[:_MOST_EVIDENCE_CHARACTERS])


def bad_nodes_file(runs: Path) -> Path:
    """Where it is, for the directory that holds the runs."""
    return runs / "bad-nodes.json"


def read_bad_nodes(runs: Path) -> list[BadNode]:
    """The bad nodes, oldest first; none where there is no file.

    Raises OwnershipError when others could have written it, OSError, or ValueError for a damaged
    file.
    """
    ownership.check_directory(runs)
    try:
        handle = ownership.open_own(bad_nodes_file(runs))
    except FileNotFoundError:
        return []
    with os.fdopen(handle) as file:
        try:
            return [BadNode.from_dict(one) for one in json.load(file)["nodes"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{bad_nodes_file(runs)} is damaged: {error}") from error


def add_bad_node(runs: Path, bad: BadNode) -> bool:
    """Add a node; False when the same run has added its host before. The oldest ones make room.

    Blocks while another run adds one. Raises what :func:`read_bad_nodes` raises.
    """
    ownership.check_directory(runs)
    lock = os.open(runs / ".bad-nodes.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_bad_nodes(runs)
        if any((one.host, one.run) == (bad.host, bad.run) for one in known):
            return False
        kept = [*known, bad][-_MOST_KEPT:]
        values = {"nodes": [asdict(one) for one in kept]}
        write_json(bad_nodes_file(runs), values, lasting=True)
        return True
    finally:
        os.close(lock)


def recent_hosts(bad: Sequence[BadNode], since_wall_seconds: float, at_most: int) -> list[str]:
    """Hosts put aside since then, by name; of more than ``at_most`` those put aside last."""
    last = {one.host: one.wall_seconds for one in sorted(bad, key=lambda one: one.wall_seconds)}
    recent = [host for host, when in last.items() if when >= since_wall_seconds]
    newest = sorted(recent, key=lambda host: last[host], reverse=True)
    return sorted(newest[:at_most])
