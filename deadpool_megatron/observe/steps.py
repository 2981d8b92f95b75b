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
    """A training iteration, and the time of its report (wall clock, seconds). Numbers are exact, as
    ``float.hex`` text; None if unknown: ``grad_norm`` of a skipped update.
    """

    iteration: int
    wall_seconds: float = field(compare=False)
    loss: str | None
    grad_norm: str | None
    learning_rate: str | None
    skipped: bool
    samples: int | None


class StepTable:
    """Steps by ascending iteration: all, or at most the ``2 * kept`` newest steps."""

    def __init__(self, kept: int | None = None) -> None:
        self._steps, self._kept = list[Step](), kept

    def add(self, iteration: int, values: Mapping[str, Any], wall_seconds: float) -> None:
        """Add the data of a STEP event, unless that step is there. Raises ValueError, TypeError or
        OverflowError for values that are not of a step, without any change.
        """
        at = self._place(iteration)
        if at < len(self) and self[at].iteration == iteration:
            return
        loss, norm, rate = (
            None if (text := values.get(name)) is None else float.fromhex(text).hex()
            for name in ("loss", "grad_norm", "learning_rate")
        )
        samples = values.get("samples")
        known = None if samples is None else int(samples)
        step = Step(iteration, wall_seconds, loss, norm, rate, bool(values.get("skipped")), known)
        self._steps.insert(at, step)
        if self._kept is not None and len(self) > 2 * self._kept:
            del self._steps[: -self._kept]

    def forget_from(self, iteration: int) -> None:
        """Drop the steps from this iteration on."""
        del self._steps[self._place(iteration) :]

    def after(self, iteration: int) -> Iterator[Step]:
        """Return the steps after an iteration, in order."""
        return itertools.islice(self._steps, self._place(iteration + 1), None)

    def newest(self, count: int) -> list[Step]:
        """Return that many newest steps, in order."""
        return self._steps[-count:]

    def __deepcopy__(self, _: object) -> StepTable:
        made = StepTable(self._kept)
        made._steps = self._steps.copy()
        return made

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps)

    def __getitem__(self, at: int) -> Step:
        return self._steps[at]

    def _place(self, iteration: int) -> int:
        if not self._steps or iteration > self._steps[-1].iteration:
            return len(self)
        return bisect_left(self._steps, iteration, key=lambda step: step.iteration)


def decimal(text: str | None) -> float | None:
    """Return the value of a hexadecimal float."""
    return None if text is None else float.fromhex(text)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return untrimmed mean, p50, p95, p99, min and max of ``values``; only ``count`` for none.

    Percentiles are values that did occur (nearest rank).
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
