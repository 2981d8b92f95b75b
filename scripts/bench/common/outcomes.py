"""The cost of a failure: arithmetic on the steps that a run has reported.

Times are wall-clock seconds of one machine; a loss is ``float.hex()`` text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from common.frame import BenchError


@dataclass(frozen=True)
class StepReport:
    """A finished step, as reported by its training. A step that is computed again reports again."""

    iteration: int
    loss: str
    wall_seconds: float


def parse_reports(lines: Iterable[str]) -> list[StepReport]:
    """Return the reports in lines of JSON. A last line without its end is still being written."""
    return [StepReport(**json.loads(line)) for line in lines if line.endswith("\n")]


def seconds_of(
    reports: Sequence[StepReport], killed_at: float, step_seconds: float
) -> tuple[float, float, int]:
    """Return the cost of a kill at wall-clock time ``killed_at``, with steps of ``step_seconds``:
    the seconds to the end of the first step after the newest that was finished before; the
    seconds that the run has lost in all; and the number of steps that were reported again. Raises
    BenchError when no step finished before the kill, or none that is new after it.
    """
    before = [report for report in reports if report.wall_seconds <= killed_at]
    after = [report for report in reports if report.wall_seconds > killed_at]
    newest = max(before, key=lambda report: report.iteration, default=None)
    new = [report for report in after if newest and report.iteration > newest.iteration]
    if newest is None or not new:
        raise BenchError(f"no new step after the kill, {len(before)} before it")
    last = max(new, key=lambda report: report.wall_seconds)
    undisturbed = (last.iteration - newest.iteration) * step_seconds
    again = {report.iteration for report in after if report.iteration <= newest.iteration}
    lost = last.wall_seconds - newest.wall_seconds - undisturbed
    return min(report.wall_seconds for report in new) - killed_at, lost, len(again)


def first_difference(reports: Iterable[StepReport], undisturbed: Mapping[int, str]) -> str | None:
    """Return where a run differs from the undisturbed run: a step has another loss or is missing.

    Reports of steps that were computed again count as well. None: all are equal.
    """
    seen = set()
    for report in reports:
        seen.add(report.iteration)
        expected = undisturbed.get(report.iteration)
        if report.loss != expected:
            return f"iteration {report.iteration}: loss {report.loss}, undisturbed {expected}"
    missing = sorted(undisturbed.keys() - seen)
    return f"iteration {missing[0]} is missing" if missing else None


def cause_in(text: str) -> str:
    """Return the reason of a failure in a program's output: its last exception or line."""
    exceptions = _EXCEPTION.findall(text)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return exceptions[-1].strip() if exceptions else lines[-1] if lines else "no output"


# The end of a traceback, perhaps after the name of a logger or rank.
_EXCEPTION = re.compile(
    r"^(?:\[\w+\]:? ?)?((?:\w+\.)*\w+(?:Error|Exception|Timeout): .*)$", re.MULTILINE
)
