"""One failure is one block: its best cause, its code, and nothing red of what was planned."""

import re
from typing import Any

import pytest

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.observe.narration import Line, Narrator
from deadpool_megatron.observe.story import Story, best_cause
from tests.common.synthetic_run import events_of


def lost(kind: str | None, node: int = 3, epoch: int = 1, *, role: int | None = None) -> Event:
    """A node; with ``role``, its process. ``kind``: None for what was ended on purpose."""
    what = Kind.NODE_LOST if role is None else Kind.MEMBER_LOST
    data = {"cause": "x"} if kind is None else {"cause": "x", "kind": kind}
    return Event(what, epoch, node, role, data={**data, "slot": 0}, wall_seconds=2.0)


def closed(kind: str, epoch: int = 1) -> Event:
    data = {"kind": kind, "cause": "y"}
    return Event(Kind.EPOCH_CLOSED, epoch, 7, data=data, wall_seconds=2.0)


def recovered(kind: str) -> Event:
    data: dict[str, Any] = {"kind": kind, "cause": "y", "seconds": 1.5, "phases": {}}
    return Event(Kind.RECOVERED, 2, data={**data, "steps_recomputed": 0}, wall_seconds=3.5)


def told(*events: Event) -> list[Line]:
    narrator = Narrator(Story())
    return [line for event in events for line in narrator.take(event)]


def codes(lines: list[Line]) -> list[str]:
    """The code of each line that has one: of a failure, or of the advice."""
    found = (re.search(r"\[([a-z-]+)\]|explain ([a-z-]+)\)", line.text) for line in lines)
    return [match[1] or match[2] for match in found if match]


SPARE = Event(Kind.MEMBER_LOST, 1, 5, data={"cause": "x", "kind": "process-crash"})


@pytest.mark.parametrize(
    ("first", "others", "code", "node"),
    [
        ("communicator-error", [], "communicator-error", 7),
        # The node that also coordinated: what its peers saw first was that it did not answer.
        ("communicator-error", [lost("node-lost")], "node-lost", 3),
        ("communicator-error", [lost("process-crash", role=1)], "process-crash", 3),
        ("process-crash", [lost("device-error", role=1)], "device-error", 3),
        ("device-error", [lost("node-cut")], "node-cut", 3),
        ("hang", [lost("node-frozen")], "node-frozen", 3),
        ("corrupt-state", [lost("node-lost")], "node-lost", 3),
        ("coordinator", [lost("process-crash", role=0)], "process-crash", 3),
        ("drained", [lost("node-lost")], "node-lost", 3),
        # Not its cause: later, on purpose, without a role, or no better.
        ("communicator-error", [lost("node-lost", epoch=2)], "communicator-error", 7),
        ("drained", [lost(None, role=1)], "drained", 7),
        ("communicator-error", [SPARE], "communicator-error", 7),
        ("node-cut", [lost("node-lost")], "node-cut", 7),
        # Found by what they are.
        ("nonfinite-loss", [lost("node-lost")], "nonfinite-loss", 7),
        ("restart", [lost("node-lost")], "restart", 7),
        ("communicator-error", [lost("of the future")], "communicator-error", 7),
    ],
)
def test_the_cause_is_the_likeliest_of_all_failures_of_an_epoch(
    first: str, others: list[Event], code: str, node: int
) -> None:
    best = best_cause([closed(first), *others])
    assert (best.data["kind"], best.node) == (code, node)


def test_a_failure_is_one_block_with_one_code() -> None:
    lines = [line for line in told(*events_of(10, 6, 0.0, began=1000.0)) if not line.passes]
    assert codes(lines) == ["node-lost"] * 2
    assert " on h: " in lines[0].text, "the host of the node"
    assert [line.style for line in lines][:3] == ["bold red", "bold green", ""]


def test_a_better_cause_is_told_when_it_is_known() -> None:
    lines = told(closed("communicator-error"), lost("node-lost"), recovered("node-lost"))
    assert codes(lines) == ["communicator-error", "node-lost", "node-lost"]


def test_what_is_planned_is_not_red_and_advises_nothing() -> None:
    lines = told(closed("drained"), lost(None, role=1), recovered("drained"))
    assert (codes(lines), [line.style for line in lines]) == (["drained"], ["", "green"])


def test_a_loss_without_an_interruption_is_told_behind_the_next_event() -> None:
    joined = Event(Kind.NODE_JOINED, 1, 9, data={"host": "h", "spare": True}, wall_seconds=3.0)
    opened = Event(Kind.EPOCH_OPENED, 1)
    assert [line.style for line in told(opened, lost("node-lost"), joined)] == ["green", "red", ""]


@pytest.mark.parametrize(("status", "style"), [(0, "bold green"), (1, "bold red")])
def test_the_end_of_a_run_is_one_line(status: int, style: str) -> None:
    data = {"exit_status": status, "reason": "z", "kind": "bug" if status else ""}
    ended = Event(Kind.RUN_ENDED, 1, data=data)
    (line,) = told(ended, lost("node-lost"), closed("node-lost"), lost("node-lost", 4))
    assert line.style == style


def test_a_number_that_is_not_known_is_not_shown() -> None:
    """A loop without clipping has no norm of the gradients."""
    step = Event(Kind.STEP, 1, iteration=3, data={"loss": "0x1p+0", "grad_norm": None})
    assert told(step)[0].text.split() == ["step", "3", "loss", "1"]
    begins = Event(Kind.EPOCH_DECIDED, 1, data={"generation": [1, 3]})
    assert told(begins, step) == told(begins), "it was computed before this run"


def test_a_coordinator_that_took_over_is_told_again_and_nobody_else() -> None:
    opened = Event(Kind.EPOCH_OPENED, 1, wall_seconds=2.0)
    steps = [Event(Kind.STEP, 1, role=0, iteration=n, wall_seconds=2.0) for n in (1, 2)]
    term = Event(Kind.COORDINATOR, 1, data={"term": 2}, wall_seconds=3.0)
    before = told(opened, *steps, term)
    found = told(opened, *steps, term, opened, *steps)
    assert found[: len(before)] == before
    assert codes(found[len(before) :]) == ["coordinator"] * 2
