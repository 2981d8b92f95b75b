"""``deadpool plan FILE --compare``: one table of all schemes of protection."""

from __future__ import annotations

from typing import Any

from deadpool_megatron.cli.tables import size, table
from deadpool_megatron.planning.compare import Row

_HEADER = (
    "scheme",
    "memory",
    "sent per step",
    "of window",
    "1 node",
    "2 nodes",
    "3 nodes",
    "domains",
    "RPO",
    "goodput",
)


def describe(name: str, rows: list[Row]) -> list[str]:
    """The table, and a line for each scheme that cannot hold."""
    held = [row for row in rows if row.found is not None]
    lines = [f"{name}: the schemes side by side", ""]
    if held:
        lines += table(_HEADER, [_cells(row.facts()) for row in held])
        lines += [
            "  memory, sent: of the fullest and of the busiest node; 1 to 3 nodes: chance that"
            " losing them loses state;",
            "  domains: those whose loss loses state; RPO: steps computed again after a loss, at"
            " most",
        ]
    return lines + [f"  {row.scheme} cannot be: {row.refusal}" for row in rows if row.refusal]


def _cells(known: dict[str, Any]) -> tuple[str, ...]:
    chances = ["0" if p == 0 else f"{p:.3g}" for p in known["loss_probability"]]
    return (
        known["scheme"],
        size(known["memory_bytes"]),
        size(known["sent_bytes_per_step"]),
        f"{known['commit_of_window']:.0%}",
        *chances,
        f"{known['fatal_domains']} of {known['domains']}",
        f"{known['most_lost_steps']} ({known['most_lost_seconds']:.3g} s)",
        f"{known['goodput']:.4f}",
    )
