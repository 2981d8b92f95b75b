"""Aligned columns of text: reports read the same on a terminal, in a log and in a bug report."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, indent: int = 2) -> list[str]:
    """Lines of a table: first column left-aligned, the others right-aligned, a rule under the
    header."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(len(cell) for cell in column) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [cells[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return (" " * indent + "  ".join(padded)).rstrip()

    rule = " " * indent + "  ".join("-" * width for width in widths)
    return [line(header), rule, *(line(row) for row in rows)]


def seconds(value: float | None) -> str:
    """Three decimals, or a dash."""
    return "-" if value is None else f"{value:.3f}"


def size(count: float) -> str:
    """Bytes for people: 12.3 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count(number: object, noun: str) -> str:
    """``1 step``, ``2 steps``; a question mark for None."""
    shown = "?" if number is None else number
    return f"{shown} {noun}" if number == 1 else f"{shown} {noun}s"
