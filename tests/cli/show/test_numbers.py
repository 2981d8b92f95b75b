"""A long run is read in little memory."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest

from deadpool_megatron.cli.show.story import Story
from deadpool_megatron.events import Event, Kind


def test_a_story_of_many_steps_takes_little_memory() -> None:
    story, steps = Story(), 20_000
    data = {"loss": (2.5).hex(), "grad_norm": None, "skipped": True, "samples": 8}
    tracemalloc.start()
    try:
        for k in range(1, steps + 1):
            story.add(Event(Kind.STEP, 1, role=0, iteration=k, data=data))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 100 * steps, "a million is less than 100 MB"
    assert story.steps[-1].step.loss == (2.5).hex()
    assert (story.last_iteration, len(story.steps)) == (steps, steps)


@pytest.mark.parametrize(
    ("iteration", "data"),
    [(10**30, {}), (2, {"samples": 10**30}), (2, {"loss": "0x1p99999"}), (2, {"loss": 3})],
)
def test_a_damaged_step_leaves_nothing_behind(iteration: int, data: dict[str, Any]) -> None:
    story = Story()
    story.add(Event(Kind.STEP, 1, iteration=1, data={"loss": (1.0).hex()}))
    with pytest.raises((ValueError, TypeError)):
        story.add(Event(Kind.STEP, 1, iteration=iteration, data=data))
    story.add(Event(Kind.STEP, 1, iteration=3, data={"loss": (3.0).hex()}))
    assert [step.step.loss for step in story.steps] == [n.hex() for n in (1.0, 3.0)]
    assert [k for k, _ in story.steps.times()] == [1, 3]


def test_what_comes_late_or_is_thrown_away_finds_its_place() -> None:
    story = Story()
    for k, loss in ((1, 1.0), (3, 3.0), (2, 2.0), (3, 9.0), (4, 4.0)):
        story.add(Event(Kind.STEP, 1, iteration=k, data={"loss": loss.hex()}))
    assert [one.step.loss for one in story.steps] == [n.hex() for n in (1.0, 2.0, 3.0, 4.0)]
    story.steps.forget_from(3)
    assert story.last_iteration == 2
