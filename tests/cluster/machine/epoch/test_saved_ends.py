"""No end throws state away: the newest generation is dumped, becomes a checkpoint, or stays."""

from collections.abc import Callable

import pytest

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.events import Kind
from deadpool_megatron.layout import records
from tests.cluster.machine.rig import Phase, Rig, g

WHERE = {"persist_directory": "/exports"}
DUMP = records.Restore("dump", g(7), "step", path="/dump/1-7")


def bug(rig: Rig) -> None:
    """The same exit twice at iteration 7."""
    failure = {"exit_code": 1, "last_line": "ValueError: bad sample"}
    rig.feed(ev.MemberLost(*rig.seat(1), **failure))  # type: ignore[arg-type]
    rig.reopened(g(7))
    rig.feed(ev.MemberLost(*rig.seat(1), **failure))  # type: ignore[arg-type]


def nan(rig: Rig) -> None:
    rig.feed(ev.NotFinite(1, 1, 1, 8, "loss", "nan"))


def divergence(rig: Rig) -> None:
    rig.feed(ev.Diverged("role 0, iteration 7: other loss"))


def no_journal(rig: Rig) -> None:
    rig.kill(1, g(7))
    rig.feed(ev.JournalFailed(2, "disk full"))


def slow_journal(rig: Rig) -> None:
    rig.kill(1, g(7))
    rig.tick(2 * rig.settings.spare_timeout_seconds)


def no_spare(rig: Rig) -> None:
    rig.lose(1, g(7))
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
    rig = Rig(nodes=2, spares=0).run(7)
    cause(rig)
    if rig.state.phase is Phase.CLOSING:
        rig.closed(g(7))
    assert rig.state.phase is Phase.DUMPING
    assert rig.only(act.Dump).generation == g(7)
    return rig


@causes
def test_interrupt_of_a_dump_keeps_the_memory(cause, status):
    del status
    rig = ending(cause)
    rig.feed(ev.UserStop("interrupted"))
    end = rig.only(act.Finish)
    assert (end.exit_status, end.keeps_slots) == (130, True)
    assert "'deadpool run --resume / --run-dir NEW' continues from it" in end.reason


# Bytes that turn out to be damaged when they are written.


def bad(node: int, role: int, iteration: int, part: str = "main") -> frozenset[records.BadPart]:
    return frozenset({records.BadPart(node, role, g(iteration), part)})


def sole_copies(*generations: records.Generation, nodes: int = 2) -> Rig:
    """No spare comes for the last node; its buddy holds the only copy of its role."""
    rig = Rig(nodes=nodes, spares=0).run()
    rig.feed(ev.NodeLost(nodes - 1, "gone"))
    rig.closed(*generations)
    rig.tick(rig.settings.spare_timeout_seconds)
    assert rig.only(act.Dump).generation == max(generations)
    return rig


def test_generation_damaged_at_the_dump_is_replaced_by_an_older():
    rig = sole_copies(g(6), g(7))
    rig.tick(rig.settings.first_step_seconds / 2)
    rig.feed(ev.Dumped(0, g(7), boundary="step", damaged=bad(0, 1, 7)))
    assert not rig.of(act.Finish), "what is whole in memory stays there until it is on the disk"
    assert rig.only(act.Dump) == act.Dump((0,), "/dump/1-6", g(6), "step")
    assert rig.state.phase_state.deadline == rig.now + rig.settings.first_step_seconds
    (log,) = rig.emitted(Kind.LOG)
    assert log.data["text"] == "node 0 has part main of role 1 damaged, generation 1:7"
    rig.feed(ev.Dumped(0, g(6), boundary="step", damaged=bad(0, 1, 7)))
    end = rig.only(act.Finish)
    assert (end.exit_status, end.keeps_slots) == (75, False)
    assert end.resume == records.Restore("dump", g(6), "step", path="/dump/1-6")


def test_run_with_only_damaged_generations_does_not_count_as_saved():
    rig = sole_copies(g(6), g(7))
    rig.feed(ev.Dumped(0, g(7), damaged=bad(0, 1, 7)))
    rig.feed(ev.Dumped(0, g(6), damaged=bad(0, 1, 7) | bad(0, 1, 6, "extras@step")))
    (dump,) = rig.of(act.Dump)
    assert dump.held == (g(7), g(6)), "hosts that come later may have the rest"
    rig.feed(ev.Dumped(0, g(7), damaged=bad(0, 0, 7)))
    end = rig.only(act.Finish)
    assert (end.exit_status, end.resume) == (1, None)
    assert "generation 1:7 lacks part main of role 1" in end.reason


def test_unkillable_process_costs_no_state_during_a_dump():
    """No recovery waits for it any more, and a drop of its node would remove its memory."""
    rig = Rig(nodes=2, spares=1, protection="local").run()
    rig.feed(ev.NodeLost(2, "gone"))
    rig.kill(1, g(7))
    rig.feed(ev.MemberSuspected(1, 0, 1, "frozen"))
    rig.feed(ev.JournalFailed(2, "disk full"))
    assert rig.only(act.Dump).nodes == (0, 1)
    rig.tick(rig.settings.close_seconds + 1)
    assert not rig.of(act.DropNode)
    rig.feed(*(ev.Dumped(node, g(7)) for node in (0, 1)))
    finish = rig.only(act.Finish)
    assert finish.resume is not None
    assert finish.resume.generation == g(7)


def dumped(nodes: int = 2, **settings: object) -> Rig:
    """Node 1 is lost after iteration 7, no spare comes, the others have dumped."""
    rig = Rig(nodes=nodes, spares=0, **{**WHERE, **settings}).run(7)
    rig.lose(1, g(7), reason="connection closed")
    rig.tick(rig.settings.spare_timeout_seconds)
    left = rig.only(act.Dump).nodes
    rig.feed(*(ev.Dumped(node, g(7)) for node in left))
    return rig


def test_export_has_a_deadline():
    rig = dumped(persist_seconds=60.0)
    rig.tick(60.0)
    assert not rig.of(act.Finish), "the exporter gives up first, and says why"
    rig.tick(rig.settings.close_seconds)
    assert rig.only(act.Finish).exit_status == 75
    logs = [log.data["text"] for log in rig.emitted(Kind.LOG)]
    assert "no longer waiting for the checkpoint of what was dumped to /dump/1-7" in logs


def test_dump_request_without_time_cancels_the_export():
    rig = Rig(nodes=2, spares=0, **WHERE).run(7)
    rig.lose(1, g(7), reason="connection closed")
    rig.tick(rig.settings.spare_timeout_seconds)
    assert not rig.feed(ev.DumpRequested("time is over"))
    rig.feed(ev.Dumped(0, g(7)))
    assert not rig.of(act.ExportDump)
    finish = rig.only(act.Finish)
    assert (finish.exit_status, finish.resume) == (75, DUMP)
    assert finish.reason.startswith("no spare node for 300 s; time is over; state dumped to")
