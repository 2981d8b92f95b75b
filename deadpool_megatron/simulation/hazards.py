"""Failures of all nodes over time: drawn from published rates, or read from a user's log.

Each node alternates between service and repair, whatever trains on it, so that all ways to recover
meet the same failures. The draws of a node depend on the seed and its number only. Pure but for the
reading of files.
"""

from __future__ import annotations

import functools
import json
import math
import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from deadpool_megatron import UserError

DAY, HOUR = 86_400.0, 3600.0
#: signs of a failure, as a coordinator sees it
NODE, PROCESS, HANG, WRONG = "node", "process", "hang", "wrong"
_FILE = Path(__file__).with_name("constants.toml")


class SimulationError(UserError, ValueError):
    """A simulation cannot be run; the message names the option or the line of the log."""


class Constant(NamedTuple):
    """A number with its range, its kind of evidence and its source."""

    value: float
    low: float
    high: float
    mark: str
    source: str


@functools.cache
def _tables() -> Mapping[str, Mapping[str, Any]]:
    return tomllib.loads(_FILE.read_text("utf-8"))


def rates() -> Mapping[str, float]:
    """Return the published failures of a node in 1,000 days, by the name of the cluster."""
    return _tables()["rates"]


def kinds() -> Mapping[str, tuple[int, str]]:
    """Return the count and the sign of each kind of failure."""
    return {kind: (count, sign) for kind, (count, sign) in _tables()["kinds"].items()}


def constants() -> Mapping[str, Constant]:
    """Return all constants by name."""
    return {name: Constant(*entry) for name, entry in _tables()["constants"].items()}


class Failure(NamedTuple):
    """A failure of a node at a time in seconds. ``repaired_at``: equals ``at`` where only a process
    of the node is affected."""

    at: float
    node: int
    kind: str
    sign: str
    repaired_at: float


class Trace(NamedTuple):
    """All failures of ``nodes`` nodes in ``seconds``, in order."""

    nodes: int
    seconds: float
    failures: tuple[Failure, ...]


@dataclass(frozen=True)
class Hazards:
    """Laws of failure and repair. ``per_node_day``: failures of a mean node in a day of service.
    ``domains``: failure domain of each node; empty: each node has its own."""

    per_node_day: float
    repair_hours: float
    shape: float = 1.0
    lemon_share: float = 0.0
    lemon_factor: float = 1.0
    domain_share: float = 0.0
    domains: tuple[int, ...] = ()

    def trace(self, seed: str, nodes: int, days: float) -> Trace:
        """Draw the failures of ``nodes`` nodes."""
        mix, end = kinds(), days * DAY
        names, counts = [*mix], [count for count, _ in mix.values()]
        base = self.per_node_day / (1 + self.lemon_share * (self.lemon_factor - 1))
        neighbours: dict[int, list[int]] = {}
        for node, domain in enumerate(self.domains):
            neighbours.setdefault(domain, []).append(node)
        found = []
        for node in range(nodes):
            draw = random.Random(f"{seed} {node}")
            factor = self.lemon_factor if draw.random() < self.lemon_share else 1.0
            scale = DAY / (base * factor) / math.gamma(1 + 1 / self.shape)
            # The run does not begin with new nodes; only with shape 1 their age is irrelevant.
            at = 0.0 if self.shape == 1 else -5 * scale
            at += draw.weibullvariate(scale, self.shape)
            while at < end:
                kind = draw.choices(names, counts)[0]
                sign, away = mix[kind][1], draw.expovariate(1 / (self.repair_hours * HOUR))
                back = at + away if sign == NODE else at
                whole = kind == "switch-or-cable" and draw.random() < self.domain_share
                struck = neighbours[self.domains[node]] if whole and self.domains else [node]
                found += [Failure(at, each, kind, sign, back) for each in struck if at >= 0]
                at = back + draw.weibullvariate(scale, self.shape)
        return Trace(nodes, end, tuple(sorted(found)))


def read_log(path: Path, nodes: int) -> Trace:
    """Read a log with a JSON object per line: ``time`` and ``repaired_at`` (seconds or ISO 8601),
    ``node`` (any name) and ``kind`` (of :func:`kinds`, or a sign). Raises SimulationError, and
    OSError if it cannot be read."""
    rows, numbers, mix = list[Failure](), dict[str, int](), kinds()
    lines = path.read_text("utf-8").splitlines()
    for line in filter(str.strip, lines):
        try:
            entry = json.loads(line)
            at, kind = _seconds(entry["time"]), str(entry["kind"])
            back = _seconds(entry.get("repaired_at", entry["time"]))
            sign = mix[kind][1] if kind in mix else kind
            if sign not in (NODE, PROCESS, HANG, WRONG) or back < at:
                raise ValueError(f"unknown kind {kind!r}, or a repair before the failure")
        except (ValueError, KeyError, TypeError) as error:
            place = f"{path}, line {lines.index(line) + 1}"
            raise SimulationError(f"{place}: {type(error).__name__} {error}") from error
        node = numbers.setdefault(str(entry["node"]), len(numbers))
        rows.append(Failure(at, node, kind, sign, back if sign == NODE else at))
    if not rows or len(numbers) > nodes:
        raise SimulationError(f"{path}: {len(numbers)} nodes with failures, the plan has {nodes}")
    first, last = min(row.at for row in rows), max(row.repaired_at for row in rows)
    moved = (r._replace(at=r.at - first, repaired_at=r.repaired_at - first) for r in rows)
    return Trace(nodes, last - first, tuple(sorted(moved)))


def _seconds(value: object) -> float:
    if isinstance(value, str):
        return datetime.fromisoformat(value).timestamp()
    return float(value)  # type: ignore[arg-type]
