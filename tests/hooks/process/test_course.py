"""A segment of an epoch: what is looked at before it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.hooks.process.course import EpochCourse
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore


@pytest.mark.parametrize(
    ("boundary", "order"), [("save", ["judged", "run"]), ("evaluation", ["run"])]
)
def test_a_state_is_judged_before_it_is_saved(boundary: str, order: list[str]) -> None:
    found, generation = list[str](), Generation(1, 3)
    parts: dict[str, Any] = {
        "entry": SimpleNamespace(
            generation=generation,
            boundary="step",
            judge_state=lambda: found.append("judged"),
            protection=SimpleNamespace(holds=lambda generation: False),
        ),
        "communicators": SimpleNamespace(finish_iteration=lambda: None),
        "reports": SimpleNamespace(role=1, section="", iteration=0),
        "own_time": SimpleNamespace(reset=lambda: None),
        "record": EpochRecord(1, {}, {}, Restore("memory", generation)),
    }
    unused: dict[str, Any] = dict.fromkeys(("pause", "saves"))
    course = EpochCourse(
        **parts,
        **unused,
        checkpoints=Path(),
        check=lambda epoch: None,
        interrupt_fd=-1,
        hash_interval=0,
    )
    course.segment(boundary, lambda: found.append("run"))
    assert found == order
