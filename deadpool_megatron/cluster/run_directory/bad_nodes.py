"""The file of bad nodes next to the runs: hosts that runs have quarantined, with time and reason.

All runs in a directory share the file: each run may add hosts, and later runs exclude these hosts,
either at submission, or when they join, as each agent reports the entry about its host.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron import file_systems, ownership
from deadpool_megatron.cluster.run_directory.directory import write_json

# The names become options of other programs.
HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
RECENT_HOURS = 72.0
# If many nodes are quarantined by mistake, enough nodes must remain for training.
MAX_EXCLUDED = 8
_MAX_ENTRIES = 1000
_LOCK_SECONDS = 10.0
_MAX_EVIDENCE_CHARACTERS = 500
_LATEST_SECONDS = 1e11  # in some thousand years


@dataclass(frozen=True)
class BadNode:
    """A host that a run has quarantined. ``kind``: the kind of failure; ``evidence``: one line.
    ``alone``: no other node of that run was on the host, so the whole host is excluded.
    """

    host: str
    kind: str
    wall_seconds: float
    run: str
    evidence: str
    alone: bool = True

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> BadNode:
        """Return the entry in ``values``. Raises KeyError, TypeError or ValueError if invalid."""
        if not HOST.fullmatch(host := str(values["host"])):
            raise ValueError(f"{host!r} is no name of a host")
        kind, run, evidence = (str(values[name]) for name in ("kind", "run", "evidence"))
        shown = "".join(c if c.isprintable() else "?" for c in evidence)
        when = values["wall_seconds"]
        # A time outside this range could not be displayed, or would never expire.
        if not isinstance(when, int | float) or not 0 <= when < _LATEST_SECONDS:
            raise ValueError(f"{str(when)[:30]} is no time")
        alone = bool(values.get("alone", True))
        return BadNode(host, kind, float(when), run, shown[:_MAX_EVIDENCE_CHARACTERS], alone)


def bad_nodes_file(runs: Path) -> Path:
    """Return the path of the file in the directory of the runs."""
    return runs / "bad-nodes.json"


def read_bad_nodes(runs: Path) -> list[BadNode]:
    """Return the bad nodes, oldest first; none where there is no file.

    Raises OwnershipError when other users could have written the file, OSError, or ValueError for a
    damaged file.
    """
    ownership.check_directory(runs)
    try:
        handle = ownership.open_own(bad_nodes_file(runs))
    except FileNotFoundError:
        return []
    with os.fdopen(handle) as file:
        try:
            return [BadNode.from_dict(node) for node in json.load(file)["nodes"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{bad_nodes_file(runs)} is damaged: {error}") from error


def add_bad_node(runs: Path, bad: BadNode) -> None:
    """Add a node, unless the same run has added its host before. The oldest entries are dropped.

    Waits while another run adds a node. Raises as :func:`read_bad_nodes` does.
    """
    with _locked(runs):
        entries = read_bad_nodes(runs)
        if not any((node.host, node.run) == (bad.host, bad.run) for node in entries):
            _write(runs, [*entries, bad])


def forget_host(runs: Path, host: str) -> int:
    """Remove the entries of a host that was repaired, and return their number.

    Waits while a run adds a node. Raises as :func:`read_bad_nodes` does.
    """
    with _locked(runs):
        entries = read_bad_nodes(runs)
        others = [node for node in entries if node.host != host]
        if len(others) < len(entries):
            _write(runs, others)
        return len(entries) - len(others)


def exclusion_reason(runs: Path, host: str, run_id: str, now_wall_seconds: float) -> str:
    """Return why a run excludes this host, with the remedy; empty where it does not.

    Only entries of other runs count, because the run itself knows its own quarantines. The newest
    entry is named. Raises as :func:`read_bad_nodes` does.
    """
    since = now_wall_seconds - RECENT_HOURS * 3600
    known = [node for node in read_bad_nodes(runs) if node.alone and node.run != run_id]
    if host not in recent_hosts(known, since, MAX_EXCLUDED):
        return ""
    newest = max((node for node in known if node.host == host), key=lambda node: node.wall_seconds)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(newest.wall_seconds))
    return (
        f"run {newest.run} quarantined {host} on {when} ({newest.kind}: {newest.evidence});"
        f" 'deadpool bad-nodes --forget {host} {runs}' after its repair"
    )


def noted_against(host: str, runs: Path, run_id: str) -> str:
    """Return why the run excludes this host now, or an empty text. A file that cannot be trusted
    excludes no host, and a line on standard error reports that.
    """
    if not bad_nodes_file(runs).exists():
        return ""
    try:
        return exclusion_reason(runs, host, run_id, time.time())
    except (OSError, ownership.OwnershipError, ValueError) as error:
        print(f"deadpool: bad nodes are not looked up: {error}", file=sys.stderr, flush=True)
        return ""


def recent_hosts(bad: Sequence[BadNode], since_wall_seconds: float, at_most: int) -> list[str]:
    """Return the latest ``at_most`` hosts that were quarantined since then, sorted by name."""
    recent = [(node.wall_seconds, node.host) for node in bad]
    newest = [host for when, host in sorted(recent, reverse=True) if when >= since_wall_seconds]
    return sorted([*dict.fromkeys(newest)][:at_most])


@contextlib.contextmanager
def _locked(runs: Path) -> Iterator[None]:
    ownership.check_directory(runs)
    lock = os.open(runs / ".bad-nodes.lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        try:
            file_systems.lock(lock, bad_nodes_file(runs), _LOCK_SECONDS)
        except BlockingIOError as error:  # a stopped process holds the lock, or storage hangs
            text = f"another run has been writing it for {_LOCK_SECONDS:g} s"
            raise OSError(errno.ETIMEDOUT, text, str(bad_nodes_file(runs))) from error
        yield
    finally:
        os.close(lock)


def _write(runs: Path, bad: Sequence[BadNode]) -> None:
    values = {"nodes": [asdict(node) for node in bad[-_MAX_ENTRIES:]]}
    write_json(bad_nodes_file(runs), values, lasting=True)
