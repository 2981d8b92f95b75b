"""The losses of a struck run of the bench ``peers``: arithmetic on reported steps.

Times are wall-clock seconds of one machine; a loss is ``float.hex()`` text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


class OutcomeError(ValueError):
    """The reports do not show the losses; the message names what is missing."""


@dataclass(frozen=True)
class StepReport:
    """A finished step, as reported by its training. A step that is computed again reports again."""

    iteration: int
    loss: str
    wall_seconds: float


@dataclass(frozen=True)
class Outcome:
    """The cost of one failure.

    ``seconds_to_new_step``: from the kill to the end of the first step after the newest that was
    finished before. ``seconds_lost``: the additional time of the run, from that newest step to the
    end, compared with the mean of its own undisturbed steps.
    """

    newest_before: int
    seconds_to_new_step: float
    seconds_lost: float
    steps_recomputed: int

    def to_dict(self) -> dict[str, float | int]:
        """JSON form."""
        return dict(vars(self))


def parse_reports(lines: Iterable[str]) -> list[StepReport]:
    """Return the reports in lines of JSON. A last line without its end is still being written.

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
    """Return the cost of a kill at wall-clock time ``killed_at`` with steps of ``step_seconds``.

    ``recomputed``: given if the training counts such steps and does not report them again. Raises
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


def ratio_of_means(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the mean of ``values`` over that of ``base``. Raises OutcomeError without values."""
    if not values or not base:
        raise OutcomeError("no steps to compare")
    return (sum(values) / len(values)) / (sum(base) / len(base))


def cause_in(text: str) -> str:
    """Return the reason of a failure in a program's output: its last exception or line."""
    exceptions = _EXCEPTION.findall(text)
    return exceptions[-1].strip() if exceptions else last_line(text)


def last_line(text: str) -> str:
    """Return the last line that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


# The end of a traceback, perhaps after the name of a logger or rank.
_EXCEPTION = re.compile(
    r"^(?:\[\w+\]:? ?)?((?:\w+\.)*\w+(?:Error|Exception|Timeout): .*)$", re.MULTILINE
)
