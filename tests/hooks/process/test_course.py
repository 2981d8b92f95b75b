"""A segment of an epoch: what is looked at before it."""

from __future__ import annotations

from unittest.mock import MagicMock

from deadpool_megatron.hooks.process.course import EpochCourse


def test_a_state_is_judged_before_it_is_saved() -> None:
    whole = MagicMock(**{"entry.boundary": "step"})
    course = EpochCourse(*(whole.entry if n == 1 else MagicMock() for n in range(11)))
    for boundary in ("evaluation", "save"):
        course.segment(boundary, whole.run)
    order = [name for name, *_ in whole.mock_calls if name in ("run", "entry.judge_state")]
    assert order == ["run", "entry.judge_state", "run"]
