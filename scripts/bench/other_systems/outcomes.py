"""What a struck run of the bench ``peers`` lost: arithmetic on reported steps, nothing else.

Times are wall-clock seconds of one machine; a loss is ``float.hex()`` text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


class OutcomeError(ValueError):
    """The reports do not tell what was lost; the message says what is missing."""


@dataclass(frozen=True)
class StepReport:
    """One finished step, as its training said it. A step that is computed again reports again."""

    iteration: int
    loss: str
    wall_seconds: float


@dataclass(frozen=True)
class Outcome:
    """What one failure cost.

    ``seconds_to_new_step``: from the kill to the end of the first step beyond the newest one that
    was finished before. ``seconds_lost``: what the run took longer than it would have, from that
    newest step to the end, at the mean of its own undisturbed steps.
    """

    newest_before: int
    seconds_to_new_step: float
    seconds_lost: float
    steps_recomputed: int

    def to_dict(self) -> dict[str, float | int]:
        """JSON form."""
        return dict(vars(self))


def parse_reports(lines: Iterable[str]) -> list[StepReport]:
    """Reports from lines of JSON. A last line without its end is one that is being written.

    Raises OutcomeError for any other line that is no report.
    """
    reports = []
    for line in lines:
        if not line.endswith("\n"):
            break
        try:
            values = json.loads(line)
            iteration, loss = int(values["iteration"]), str(values["loss"])
            reports.append(StepReport(iteration, loss, float(values["wall_seconds"])))
        except (ValueError, KeyError, TypeError) as error:
            raise OutcomeError(f"not a report of a step: {line.rstrip()!r}") from error
    return reports


def outcome(
    reports: Sequence[StepReport],
    killed_at: float,
    step_seconds: float,
    recomputed: int | None = None,
) -> Outcome:
    """What the kill at wall-clock time ``killed_at`` cost a run whose steps take ``step_seconds``.

    ``recomputed``: where the training itself tells it and does not report such steps again. Raises
    OutcomeError when no step finished before the kill, or none that is new after it.
    """
    before = [report for report in reports if report.wall_seconds <= killed_at]
    after = [report for report in reports if report.wall_seconds > killed_at]
    if not before:
        raise OutcomeError("no step was finished before the kill")
    newest = max(before, key=lambda report: report.iteration)
    new = [report for report in after if report.iteration > newest.iteration]
    if not new:
        raise OutcomeError(f"no step beyond {newest.iteration} was finished after the kill")
    last = max(new, key=lambda report: report.wall_seconds)
    undisturbed = (last.iteration - newest.iteration) * step_seconds
    again = {report.iteration for report in after if report.iteration <= newest.iteration}
    return Outcome(
        newest_before=newest.iteration,
        seconds_to_new_step=min(report.wall_seconds for report in new) - killed_at,
        seconds_lost=last.wall_seconds - newest.wall_seconds - undisturbed,
        steps_recomputed=len(again) if recomputed is None else recomputed,
    )


def first_difference(reports: Iterable[StepReport], undisturbed: Mapping[int, str]) -> str | None:
    """Where a run left the undisturbed one: a step with another loss, or a step it lacks.

    Every report counts, those of steps that were computed again as well. None: all are equal.
    """
    seen = set()
    for report in reports:
        seen.add(report.iteration)
        expected = undisturbed.get(report.iteration)
        if report.loss != expected:
            return f"iteration {report.iteration}: loss {report.loss}, undisturbed {expected}"
    missing = sorted(undisturbed.keys() - seen)
    return f"iteration {missing[0]} is missing" if missing else None


def ratio_of_means(values: Sequence[float], base: Sequence[float]) -> float:
    """Mean of ``values`` over mean of ``base``. Raises OutcomeError without values."""
    if not values or not base:
        raise OutcomeError("no steps to compare")
    return (sum(values) / len(values)) / (sum(base) / len(base))


def cause_in(text: str) -> str:
    """Why a program failed, from all that it wrote: its last exception, else its last line."""
    exceptions = _EXCEPTION.findall(text)
    return exceptions[-1].strip() if exceptions else last_line(text)


def last_line(text: str) -> str:
    """The last line that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


# As the end of a traceback, whatever logger or rank stands before it.
_EXCEPTION = re.compile(
    r"^(?:\[\w+\]:? ?)?((?:\w+\.)*\w+(?:Error|Exception|Timeout): .*)$", re.MULTILINE
)
