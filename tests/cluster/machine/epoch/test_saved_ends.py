"""No end throws state away: whatever ends a run, its newest generation is dumped, or stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from tests.cluster.machine.rig import Phase, Rig, g, killed


def bug(rig: Rig) -> None:
    """The same exit twice at iteration 7."""
    failure = {"exit_code": 1, "last_line": "ValueError: bad sample"}
    rig.feed(ev.MemberLost(*rig.seat(1), **failure))  # type: ignore[arg-type]
    rig.closed(g(7))
    rig.journal()
    rig.restored()
    rig.feed(ev.MemberLost(*rig.seat(1), **failure))  # type: ignore[arg-type]


def nan(rig: Rig) -> None:
    rig.feed(ev.LossNotFinite(1, 1, 1, 8, "nan"))


def divergence(rig: Rig) -> None:
    rig.feed(ev.Diverged("role 0, iteration 7: other loss"))


def no_journal(rig: Rig) -> None:
    rig.feed(killed(rig, 1))
    rig.closed(g(7))
    rig.feed(ev.JournalFailed(2, "disk full"))


def slow_journal(rig: Rig) -> None:
    rig.feed(killed(rig, 1))
    rig.closed(g(7))
    rig.tick(2 * rig.settings.spare_timeout_seconds)


def no_spare(rig: Rig) -> None:
    rig.feed(ev.NodeLost(1, "gone"))
    rig.closed(g(7))
    rig.tick(rig.settings.spare_timeout_seconds)


def outgrown(rig: Rig) -> None:
    """Once: a process that follows would come to the same."""
    rig.feed(ev.MemberLost(*rig.seat(1), exit_code=76, last_line="has grown to 900 bytes"))


CAUSES = [
    (bug, 1),
    (nan, 4),
    (divergence, 3),
    (no_journal, 1),
    (slow_journal, 1),
    (no_spare, 75),
    (outgrown, 76),
]
causes = pytest.mark.parametrize(("cause", "status"), CAUSES)


def ending(cause: Callable[[Rig], None]) -> Rig:
    """The run until its state is being written."""
    rig = Rig(nodes=2, spares=0).run()
    rig.steps(7)
    cause(rig)
    if rig.state.phase is Phase.CLOSING:
        rig.closed(g(7))
    assert rig.state.phase is Phase.DUMPING
    assert rig.one(act.Dump).generation == g(7)
    return rig


@causes
def test_the_newest_generation_is_dumped(cause: Callable[[Rig], None], status: int) -> None:
    rig = ending(cause)
    rig.feed(*(ev.Dumped(node, g(7)) for node in rig.one(act.Dump).nodes))
    end = rig.one(act.Finish)
    assert (end.exit_status, end.keeps_slots) == (status, False)
    assert end.resume is not None
    assert (end.resume.kind, end.resume.path) == ("dump", "/dump/1-7")
    told = "state dumped to /dump/1-7: continue with 'deadpool run --resume / --run-dir NEW'"
    assert told in end.reason


@causes
def test_it_stays_in_memory_where_it_cannot_be_written(
    cause: Callable[[Rig], None], status: int
) -> None:
    rig = ending(cause)
    for node in rig.one(act.Dump).nodes:
        rig.feed(ev.Dumped(node, g(7), error="disk full"))
    while rig.state.phase is Phase.DUMPING:  # what is left of it is tried as well
        rig.tick(rig.settings.first_step_seconds)
    end = rig.one(act.Finish)
    assert (end.exit_status, end.keeps_slots) == (1 if status == 75 else status, True)
    assert "'deadpool run --resume / --run-dir NEW' on their hosts writes it first" in end.reason


@causes
def test_who_interrupts_it_does_not_lose_it(cause: Callable[[Rig], None], status: int) -> None:
    del status
    rig = ending(cause)
    rig.feed(ev.UserStop("interrupted"))
    end = rig.one(act.Finish)
    assert (end.exit_status, end.keeps_slots) == (130, True)
    assert "'deadpool run --resume / --run-dir NEW' goes on from it" in end.reason


def test_a_node_with_no_restarts_left_is_not_given_up_before_it_has_written() -> None:
    rig = Rig(nodes=1, spares=0, restarts_in_place=2).run()
    rig.steps(7)
    for attempt in range(3):
        rig.feed(killed(rig, 0, 11 - attempt))
        if attempt < 2:
            rig.closed(g(7))
            rig.journal()
            rig.restored()
    assert not rig.of(act.DropNode)
    assert rig.saved_end(g(7)).exit_status == 1
