"""Steps of a run with their numbers, and summaries of numbers. Pure."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Step:
    """A training iteration. ``wall_seconds``: wall clock of its report. Numbers are texts of
    ``float.hex``, which are exact, and None if unknown, as the ``grad_norm`` of a skipped update.
    ``samples``: all samples consumed so far.
    """

    iteration: int
    wall_seconds: float = field(compare=False)
    loss: str | None
    grad_norm: str | None
    learning_rate: str | None
    skipped: bool
    samples: int | None


class StepTable:
    """Steps in ascending order of iteration. With ``kept``, old steps are dropped, and between
    ``kept`` and ``2 * kept`` of the newest remain."""

    def __init__(self, kept: int | None = None) -> None:
        self._steps, self._kept = list[Step](), kept

    def add(self, iteration: int, values: Mapping[str, Any], wall_seconds: float) -> None:
        """Add the data of a STEP event, unless the table has that step. Raises ValueError,
        TypeError or OverflowError for invalid values, without any change.
        """
        index = self._index(iteration)
        if index < len(self) and self[index].iteration == iteration:
            return
        loss, norm, rate = (
            None if (text := values.get(name)) is None else float.fromhex(text).hex()
            for name in ("loss", "grad_norm", "learning_rate")
        )
        consumed = values.get("samples")
        samples = None if consumed is None else int(consumed)
        step = Step(iteration, wall_seconds, loss, norm, rate, bool(values.get("skipped")), samples)
        self._steps.insert(index, step)
        if self._kept is not None and len(self) > 2 * self._kept:
            del self._steps[: -self._kept]

    def forget_from(self, iteration: int) -> None:
        """Drop the steps from this iteration on."""
        del self._steps[self._index(iteration) :]

    def after(self, iteration: int) -> Iterator[Step]:
        """Return the steps after an iteration, in order."""
        return itertools.islice(self._steps, self._index(iteration + 1), None)

    def newest(self, count: int) -> list[Step]:
        """Return the ``count`` newest steps, in order."""
        return self._steps[-count:]

    def __deepcopy__(self, _: object) -> StepTable:
        table = StepTable(self._kept)
        table._steps = self._steps.copy()
        return table

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __getitem__(self, index: int) -> Step:
        return self._steps[index]

    def _index(self, iteration: int) -> int:
        """Return the index of the first step that is not before ``iteration``."""
        if not self._steps or iteration > self._steps[-1].iteration:
            return len(self)
        return bisect_left(self._steps, iteration, key=lambda step: step.iteration)


def decimal(text: str | None) -> float | None:
    """Return the value of a hexadecimal float; None for None."""
    return None if text is None else float.fromhex(text)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return count, mean (of all values), p50, p95, p99, min and max; only the count if there are
    no values. Percentiles are values that occurred (nearest rank).
    """
    if not values:
        return {"count": 0}
    ranked = sorted(values)
    percentiles = {
        f"p{percent}": ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]
        for percent in (50, 95, 99)
    }
    ends = {"min": ranked[0], "max": ranked[-1]}
    return {"count": len(ranked), "mean": statistics.fmean(ranked), **percentiles, **ends}
