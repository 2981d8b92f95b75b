"""Rows of figures: every value, means, intervals, a table and a plot."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from deadpool_megatron.observe.steps import summary

Row = dict[str, Any]
_SPREAD_SHOWN = 4  # values
# Student's t, two-sided 95 %, by degrees of freedom from 1; 2.0 above.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)


def row(
    name: str,
    values: Mapping[str, Sequence[float]],
    ratios: Mapping[str, Sequence[float]] | None = None,
    at: float | None = None,
) -> Row:
    """Return a row. ``values``: by quantity, the first being processor time of our threads;
    ``ratios``: of each pair; ``at``: the size, where rows of one name differ in it."""
    return {
        "row": name,
        "at": at,
        "values": {quantity: list(each) for quantity, each in values.items()},
        "summary": {quantity: summary(each) for quantity, each in values.items()},
        "ratios": {
            quantity: interval(pairs) for quantity, pairs in (ratios or {}).items() if pairs
        },
    }


def interval(pairs: Sequence[float]) -> dict[str, Any]:
    """Return the mean of ratios with its interval, and whether that is narrower than the effect."""
    logs = [math.log(pair) for pair in pairs]
    found: dict[str, Any] = {"mean": math.exp(fmean(logs)), "resolved": False, "pairs": [*pairs]}
    if len(logs) > 1:
        half = stdev(logs) / math.sqrt(len(logs)) * _t(len(logs) - 1)
        found |= {"low": math.exp(fmean(logs) - half), "high": math.exp(fmean(logs) + half)}
        found["resolved"] = found["high"] - found["low"] <= abs(found["mean"] - 1)
    return found


def _t(free: int) -> float:
    return _T[free - 1] if free <= len(_T) else 2.0


def slope(points: Sequence[tuple[float, float]], groups: Sequence[object] = ()) -> dict[str, float]:
    """Return the slope of a line through points, with its interval. ``groups``: of each point,
    where lines of one slope have levels of their own."""
    by_group = defaultdict(list)
    for point, group in zip(points, groups or [None] * len(points), strict=True):
        by_group[group].append(point)
    around: list[tuple[float, float]] = []
    for each in by_group.values():
        x, y = fmean(p[0] for p in each), fmean(p[1] for p in each)
        around += [(p[0] - x, p[1] - y) for p in each]
    spread = sum(x * x for x, _ in around)
    free = len(around) - len(by_group) - 1
    if not spread or free < 1:
        return {}
    mean = sum(x * y for x, y in around) / spread
    error = math.sqrt(sum((y - mean * x) ** 2 for x, y in around) / free / spread)
    return {"mean": mean, "low": mean - _t(free) * error, "high": mean + _t(free) * error}


def name_of(line: Row) -> str:
    """Return the name of a row with its size."""
    return line["row"] if line["at"] is None else f"{line['row']} ({line['at']:g})"


def table(rows: Sequence[Row]) -> str:
    """Return a line for each row: means, with percentiles of four values and more, and ratios with
    their interval."""
    lines = []
    for line in rows:
        shown = []
        for quantity, each in line["summary"].items():
            if each["count"]:
                ends = [f"{name} {each[name]:.4g}" for name in ("p50", "p95", "p99", "max")]
                more = f" ({', '.join(ends)})" if each["count"] >= _SPREAD_SHOWN else ""
                shown.append(f"{quantity} {each['mean']:.4g}{more}")
        for quantity, each in line["ratios"].items():
            ends = f" ({each['low']:.3f} to {each['high']:.3f})" if "low" in each else ""
            verdict = "" if each["resolved"] else " unresolved"
            shown.append(f"{quantity} {each['mean']:.3f}{ends}{verdict}")
        lines.append(f"{name_of(line)}: {', '.join(shown)}")
    return "\n".join(lines)


def draw(facts: Mapping[str, Any], path: Path) -> None:
    """Write a picture with a panel for each quantity: every value as a point, against the sizes of
    the rows if they have sizes, and a line through the means; then a panel for each of ``curves``,
    pairs of a name and points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: Sequence[Row] = facts["rows"]
    names = list(dict.fromkeys(line["row"] for line in rows))
    panels: dict[str, list[tuple[str, float, list[float]]]] = defaultdict(list)
    for number, line in enumerate(rows):
        at = number if line["at"] is None else line["at"]
        pairs = {name: each["pairs"] for name, each in line["ratios"].items()}
        for quantity, values in {**line["values"], **pairs}.items():
            if values:
                panels[quantity].append((line["row"], at, values))
    curves = facts.get("curves", {})
    count = len(panels) + len(curves)
    size = {"figsize": (9, 2.4 * count), "layout": "constrained", "squeeze": False}
    figure, axes = pyplot.subplots(count, 1, **size)
    machine = facts["machine"]
    figure.suptitle(f"{facts['bench']}, {machine['commit'][:8]}, {machine['cores']} cores")
    for (quantity, found), axis in zip(panels.items(), axes[:, 0], strict=False):
        for index, name in enumerate(names):
            places = [(at, values) for other, at, values in found if other == name]
            means = [fmean(values) for _, values in places]
            axis.plot([at for at, _ in places], means, color=f"C{index}", label=name)
            for at, values in places:
                axis.scatter([at] * len(values), values, s=9, color=f"C{index}")
        axis.set_ylabel(quantity.replace("_", " "), fontsize=7)
        if all(line["at"] is None for line in rows):
            texts = [line["row"] for line in rows]
            axis.set_xticks(range(len(rows)), texts, rotation=35, ha="right", fontsize=7)
        else:
            axis.legend(fontsize=6, ncols=3)
    for (quantity, lines), axis in zip(curves.items(), axes[len(panels) :, 0], strict=True):
        shades = {name: f"C{index}" for index, name in enumerate(dict(lines))}
        for name, points in lines:
            axis.plot(*zip(*points, strict=True), color=shades[name], linewidth=0.7)
        for name, shade in shades.items():
            axis.plot([], [], color=shade, label=name)
        axis.set_ylabel(quantity.replace("_", " "), fontsize=7)
        axis.legend(fontsize=6, ncols=3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
