"""No spare is left: what was dumped becomes a checkpoint, too, where exports are configured."""

from __future__ import annotations

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Restore
from tests.cluster.machine.rig import Phase, Rig, g

WHERE = {"persist_directory": "/exports"}
DUMP = Restore("dump", g(7), "step", path="/dump/1-7")


def dumped(nodes: int = 2, **settings: object) -> Rig:
    """Node 1 is lost after iteration 7, no spare comes, the others have dumped."""
    rig = Rig(nodes=nodes, spares=0, **{**WHERE, **settings}).run(7)
    rig.lose(1, g(7), why="connection closed")
    rig.tick(rig.settings.spare_timeout_seconds)
    left = rig.one(act.Dump).nodes
    rig.feed(*(ev.Dumped(node, g(7)) for node in left))
    return rig


def test_an_export_follows_the_dump_and_the_end_follows_the_export() -> None:
    rig = dumped()
    assert rig.one(act.ExportDump) == act.ExportDump(DUMP, {0: 0, 1: 0})
    assert not rig.of(act.Finish)
    assert rig.state.waiting_for() == "the checkpoint of what was dumped to /dump/1-7"
    rig.feed(ev.DumpExported(g(7), "/exports/iter_0000007"))
    finish = rig.one(act.Finish)
    assert (finish.exit_status, finish.resume) == (75, DUMP)
    assert "state dumped to /dump/1-7: continue with" in finish.reason
    assert finish.reason.endswith("Megatron's --load in /exports/iter_0000007")


def test_roles_of_lost_nodes_are_spread_over_the_others() -> None:
    rig = dumped(nodes=4)
    assert rig.one(act.ExportDump).roles == {0: 0, 1: 2, 2: 2, 3: 3}


def test_an_export_that_comes_to_nothing_ends_the_run_as_ever() -> None:
    rig = dumped()
    rig.feed(ev.DumpExported(g(7), ""))
    finish = rig.one(act.Finish)
    assert (finish.exit_status, finish.resume) == (75, DUMP)
    assert finish.reason.endswith("and the same other arguments")


def test_an_export_has_a_deadline() -> None:
    rig = dumped(persist_seconds=60.0)
    rig.tick(60.0)
    assert not rig.of(act.Finish), "the exporter gives up first, and says why"
    rig.tick(rig.settings.close_seconds)
    assert rig.one(act.Finish).exit_status == 75
    told = [one.data["text"] for one in rig.emitted(Kind.LOG)]
    assert "waited long enough for the checkpoint of what was dumped to /dump/1-7" in told


def test_a_node_that_is_lost_meanwhile_ends_nothing_by_itself() -> None:
    rig = dumped(nodes=4)
    rig.feed(ev.NodeLost(2, "connection closed"))
    assert not rig.of(act.Finish)
    assert not rig.of(act.ExportDump)
    rig.feed(ev.DumpExported(g(7), ""))
    assert rig.one(act.Finish).exit_status == 75


def test_who_has_no_time_ends_it() -> None:
    rig = dumped()
    rig.feed(ev.DumpRequested("time is over"))
    assert rig.one(act.Finish).exit_status == 75
    assert not rig.of(act.Dump)


def test_the_end_of_another_export_is_passed_over() -> None:
    rig = dumped()
    rig.feed(ev.DumpExported(g(6), "/exports/iter_0000006"))
    assert not rig.of(act.Finish)
    running = Rig(nodes=2, spares=0, **WHERE).run()
    running.feed(ev.DumpExported(g(7), ""))
    assert running.state.phase is Phase.RUNNING


def test_a_run_that_had_its_last_export_before_ends_with_the_dump() -> None:
    rig = Rig(nodes=2, spares=0, **WHERE).run(7)
    rig.feed(ev.DumpRequested("time is over"))
    rig.feed(*(ev.Paused(*rig.seat(role), 1, 9) for role in (0, 1)))
    rig.closed(g(9))
    rig.feed(*(ev.Dumped(node, g(9)) for node in (0, 1)))
    assert rig.one(act.Finish).exit_status == 75


def test_who_interrupts_the_export_does_not_lose_what_was_dumped() -> None:
    rig = dumped()
    rig.feed(ev.UserStop("interrupted"))
    finish = rig.one(act.Finish)
    assert (finish.exit_status, finish.resume) == (75, DUMP)
    assert "continue with 'deadpool run --resume" in finish.reason


def test_who_has_no_time_while_the_nodes_still_dump_gets_no_export_after_it() -> None:
    rig = Rig(nodes=2, spares=0, **WHERE).run(7)
    rig.lose(1, g(7), why="connection closed")
    rig.tick(rig.settings.spare_timeout_seconds)
    assert not rig.feed(ev.DumpRequested("time is over"))
    rig.feed(ev.Dumped(0, g(7)))
    assert not rig.of(act.ExportDump)
    finish = rig.one(act.Finish)
    assert (finish.exit_status, finish.resume) == (75, DUMP)
    assert finish.reason.startswith("no spare node for 300 s; time is over; state dumped to")
