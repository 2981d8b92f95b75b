"""The verdict of ``deadpool check`` for people: a table, in colours where there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from deadpool_megatron.cli.tables import count, size, table
from deadpool_megatron.preflight.facts import NodeFacts
from deadpool_megatron.preflight.judge import Standing

_HEADER = (
    "node", "host", "rack", "GPUs", "/dev/shm free", "memory", "clock", "out/s", "in/s",
    "round trip", "verdict", "id",
)  # fmt: skip
_COLOURS = {Standing.GOOD: "green", Standing.SPARE: "yellow", Standing.LEFT_OUT: "bold red"}


def show(content: Mapping[str, Any]) -> None:
    """Print the content of ``check.json``."""
    rows = [_row(entry) for entry in _with_middle(content["nodes"])]
    if not (sys.stdout.isatty() and _show_in_colours(content["nodes"], rows)):
        print("\n".join(table(_HEADER, rows)))
    print("\n".join(_remarks(content)))


def describe_machine(facts: NodeFacts, problems: Sequence[str]) -> list[str]:
    """This machine alone."""
    address = facts.address or "no address that others reach"
    memlock = "unlimited" if facts.memlock_bytes is None else size(facts.memlock_bytes)
    files = "unlimited" if facts.open_files is None else str(facts.open_files)
    rows = [
        ("host", facts.hostname),
        ("address", f"{address} ({facts.interface})" if facts.interface else address),
        ("GPUs", str(facts.gpus)),
        ("/dev/shm", f"{size(facts.shm_free_bytes)} free of {size(facts.shm_bytes)}"),
        ("memory available", size(facts.memory_bytes)),
        ("memory that can be locked", memlock),
        ("open files", files),
        *sorted(facts.versions.items()),
    ]
    width = max(len(title) for title, _ in rows)
    lines = [f"{title.ljust(width)}  {text}" for title, text in rows]
    return [*lines, *([f"problem: {text}" for text in problems] or ["ok"])]


def _with_middle(nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Clocks are shown against the median, as they are judged: any one node's may be wrong."""
    offsets = [entry["clock"]["offset_seconds"] for entry in nodes if entry["clock"]]
    middle = median(offsets) if offsets else 0.0
    return [{**entry, "middle_seconds": middle} for entry in nodes]


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    facts, clock, rates = entry["facts"], entry["clock"], entry["rates"]
    measured: tuple[str, ...] = ("-",) * 5
    if facts:
        shown = "-"
        if clock:
            offset = (clock["offset_seconds"] - entry["middle_seconds"]) * 1000
            shown = f"{offset:+.1f} ms"
        measured = (
            facts["domain"] or "-",
            str(facts["gpus"]),
            size(facts["shm_free_bytes"]),
            size(facts["memory_bytes"]),
            shown,
        )
    links: tuple[str, ...] = ("-",) * 3
    if rates:
        links = (
            size(max(rate["out_bytes_per_second"] for rate in rates)),
            size(max(rate["in_bytes_per_second"] for rate in rates)),
            f"{min(rate['round_trip_seconds'] for rate in rates) * 1000:.2f} ms",
        )
    place = "-" if entry["id"] is None else str(entry["id"])
    host = entry["hostname"] or "-"
    return (str(entry["node"]), host, *measured, *links, str(entry["standing"]), place)


def _remarks(content: Mapping[str, Any]) -> list[str]:
    lines = [
        f"node {entry['node']}: {entry['standing']}: {reason}"
        for entry in content["nodes"]
        for reason in entry["reasons"]
    ]
    standings = [entry["standing"] for entry in content["nodes"]]
    wanted = content["wanted"]
    if not content["ok"]:
        return [*lines, f"not enough: {content['advice']}"]
    used = sum(entry["id"] is not None for entry in content["nodes"]) - wanted["nodes"]
    out = standings.count(Standing.LEFT_OUT)
    return [
        *lines,
        f"ok: {count(wanted['nodes'], 'node')} to train on, {count(used, 'spare')}, {out} left out",
    ]


def _show_in_colours(nodes: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[str]]) -> bool:
    """False where rich is missing."""
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for title in _HEADER:
        shown.add_column(title, justify="left" if title in ("host", "verdict") else "right")
    for entry, row in zip(nodes, rows, strict=True):
        style = _COLOURS[Standing(entry["standing"])]
        shown.add_row(*(Text(cell) for cell in row), style=style)
    Console(highlight=False).print(shown)
    return True
