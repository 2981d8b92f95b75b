"""Failures of all nodes over time: drawn from published rates, or read from a user's log.

Each node alternates between service and repair, whatever trains on it, so that all ways to recover
meet the same failures. The draws of a node depend on the seed and its number only. Pure but for the
reading of files.
"""

from __future__ import annotations

import json
import math
import random
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from deadpool_megatron import UserError

DAY, HOUR = 86_400.0, 3600.0
#: signs of a failure, as a coordinator sees it
NODE, PROCESS, HANG, WRONG = "node", "process", "hang", "wrong"
_TABLES = tomllib.loads(Path(__file__).with_name("constants.toml").read_text("utf-8"))
#: failures of a node in 1,000 days, by the name of the cluster
RATES: Mapping[str, float] = _TABLES["rates"]
#: kind of failure -> its count in Llama 3's run, and its sign
KINDS = {k: (n, sign) for sign, table in _TABLES["kinds"].items() for k, n in table.items()}
#: name -> value, lowest, highest, kind of evidence, source
CONSTANTS: Mapping[str, tuple[float, float, float, str, str]] = _TABLES["constants"]


class SimulationError(UserError, ValueError):
    """A simulation cannot be run; the message names the option or the line of the log."""


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
        end, counts = days * DAY, [count for count, _ in KINDS.values()]
        base = self.per_node_day / (1 + self.lemon_share * (self.lemon_factor - 1))
        found = []
        for node in range(nodes):
            draw = random.Random(f"{seed} {node}")
            factor = self.lemon_factor if draw.random() < self.lemon_share else 1.0
            scale = DAY / (base * factor) / math.gamma(1 + 1 / self.shape)
            # The run does not begin with new nodes; only with shape 1 their age is irrelevant.
            at = 0.0 if self.shape == 1 else -5 * scale
            at += draw.weibullvariate(scale, self.shape)
            while at < end:
                kind = draw.choices([*KINDS], counts)[0]
                sign, away = KINDS[kind][1], draw.expovariate(1 / (self.repair_hours * HOUR))
                back = at + away if sign == NODE else at
                struck = [node]
                if kind == "switch-or-cable" and draw.random() < self.domain_share:
                    struck = [n for n, d in enumerate(self.domains) if d == self.domains[node]]
                found += [Failure(at, each, kind, sign, back) for each in struck if at >= 0]
                at = back + draw.weibullvariate(scale, self.shape)
        return Trace(nodes, end, tuple(sorted(found)))


def read_log(path: Path, nodes: int) -> Trace:
    """Read a log with a JSON object per line: ``time`` and ``repaired_at`` (seconds or ISO 8601),
    ``node`` (any name) and ``kind`` (of KINDS, or a sign). Raises SimulationError, and
    OSError if it cannot be read."""
    rows, numbers = list[Failure](), dict[str, int]()
    lines = path.read_text("utf-8").splitlines()
    for line in filter(str.strip, lines):
        try:
            entry = json.loads(line)
            at, kind = _seconds(entry["time"]), str(entry["kind"])
            back = _seconds(entry.get("repaired_at", entry["time"]))
            sign = KINDS[kind][1] if kind in KINDS else kind
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
    is_text = isinstance(value, str) and not value.replace(".", "").isdigit()
    return datetime.fromisoformat(str(value)).timestamp() if is_text else float(str(value))
