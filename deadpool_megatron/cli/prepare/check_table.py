"""What was found out about nodes, for people: a table, in colours where there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from deadpool_megatron.cli.tables import count, size, table
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.preflight.facts import HostFacts
from deadpool_megatron.preflight.judge import Standing

_HEADER = (
    "node", "host", "rack", "GPUs", "/dev/shm free", "memory", "clock", "out/s", "in/s",
    "round trip", "verdict",
)  # fmt: skip
_COLOURS = {Standing.GOOD: "green", Standing.WEAK: "yellow", Standing.LEFT_OUT: "bold red"}


def judged_nodes(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Returns what was found out about each node, from the events of a run; by node."""
    found = {e.node: dict(e.data) for e in events if e.kind is Kind.NODE_JUDGED}
    return [{"node": node, **data} for node, data in sorted(found.items())]


def show(nodes: Sequence[Mapping[str, Any]], why_not: str, wanted: int) -> None:
    """Print a table of :func:`judged_nodes`, and whether ``wanted`` of them are good."""
    rows = [_row(entry) for entry in _with_middle(nodes)]
    if not (sys.stdout.isatty() and _show_in_colours(nodes, rows)):
        print("\n".join(table(_HEADER, rows)))
    print("\n".join(_remarks(nodes, why_not, wanted)))


def describe_host(facts: HostFacts, problems: Sequence[str]) -> list[str]:
    """Returns the lines about one host alone."""
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


def _with_middle(nodes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Clocks are shown against the median, as they are judged: any one node's may be wrong."""
    offsets = [entry["clock_seconds"] for entry in nodes if "clock_seconds" in entry]
    middle = median(offsets) if offsets else 0.0
    return [{**entry, "middle_seconds": middle} for entry in nodes]


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    facts = entry.get("facts")
    host: tuple[str, ...] = ("-",) * 5
    if facts:
        host = (
            facts["hostname"],
            entry["domain"] or "-",
            str(facts["gpus"]),
            size(facts["shm_free_bytes"]),
            size(facts["memory_bytes"]),
        )
    clock = "-"
    if "clock_seconds" in entry:
        clock = f"{(entry['clock_seconds'] - entry['middle_seconds']) * 1000:+.1f} ms"
    rates = [size(entry[way]) if way in entry else "-" for way in ("sent", "received")]
    trip = "-"
    if "round_trip_seconds" in entry:
        trip = f"{entry['round_trip_seconds'] * 1000:.2f} ms"
    return (str(entry["node"]), *host, clock, *rates, trip, str(entry["standing"]))


def _remarks(nodes: Sequence[Mapping[str, Any]], why_not: str, wanted: int) -> list[str]:
    lines = [
        f"node {entry['node']}: {entry['standing']}: {reason}"
        for entry in nodes
        for reason in entry["reasons"]
    ]
    if why_not:
        return [*lines, f"{why_not}{_advice(nodes)}"]
    standings = [entry["standing"] for entry in nodes]
    out = standings.count(Standing.LEFT_OUT)
    spares = len(nodes) - out - wanted
    return [
        *lines,
        f"ok: {count(wanted, 'node')} to train on, {count(spares, 'spare')}, {out} left out",
    ]


def _advice(nodes: Sequence[Mapping[str, Any]]) -> str:
    names = [
        (entry["facts"]["hostname"], entry["standing"]) for entry in nodes if entry.get("facts")
    ]
    # Where all nodes are on one host, leaving hosts out would leave nothing.
    good = {name for name, standing in names if standing == Standing.GOOD}
    bad = sorted({name for name, _ in names} - good)
    return (
        f": mend what is named above, or take others (sbatch --exclude={','.join(bad)})"
        if bad
        else ""
    )


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
