"""Losses in every phase: one close, one decision from the inventories, one record."""

import pytest

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.watch.hang import table_of
from deadpool_megatron.layout.records import BadPart, Restore
from tests.cluster.machine.rig import SIGKILL, Phase, Rig, Seat, g, killed, nodes_of


@pytest.mark.parametrize("late", [ev.Tick(), ev.StepReported(1, 3), ev.MemberHello(0, 0, 0)])
def test_closing_ends_only_at_its_deadline(late):
    rig = Rig().run()
    rig.feed(killed(rig, 1))
    rig.closed(g(7), nodes=[0, 1])
    rig.feed(late)
    assert rig.state.phase is Phase.CLOSING
    rig.tick(rig.settings.gather_seconds)
    assert rig.only(act.DropNode).node == 2
    assert rig.state.phase is Phase.DECIDING
    assert set(rig.pending.nodes) == {0, 1}


def test_member_frozen_while_the_journal_writes_is_reaped_before_the_next_decision():
    rig = Rig().run()
    rig.kill(1, g(7))
    rig.feed(ev.MemberSuspected(0, 0, 0, "frozen"))
    rig.journal()
    assert not rig.of(act.Announce)
    assert not rig.of(act.WriteRecord)
    assert rig.state.phase is Phase.CLOSING
    rig.feed(ev.MemberLost(0, 0, 0, signal=SIGKILL))
    assert (rig.pending.epoch, rig.pending.seats[0]) == (3, Seat(0, 0, 1))


def test_journal_that_cannot_write_ends_the_run_that_had_not_begun():
    silent = Rig()
    silent.gather()
    silent.tick(2 * silent.settings.spare_timeout_seconds)
    end = silent.only(act.Finish)
    assert end.exit_status == 1
    assert "journal of epoch 1" in end.reason
    assert "nothing was computed yet" in end.reason


def raised(rig: Rig, role: int = 0, text: str = "ValueError: bad sample 17") -> ev.MemberRaised:
    return ev.MemberRaised(*rig.seat(role), rig.record.epoch, text)


@pytest.mark.parametrize("is_fault", [True, False])
def test_loss_of_a_peer_explains_failed_communication_and_exceptions(is_fault):
    rig = Rig().run()
    rig.feed(ev.MemberFault(0, 0, 0, 1, "connection reset") if is_fault else raised(rig))
    assert rig.state.phase is Phase.RUNNING
    rig.tick(0.2)
    rig.feed(ev.NodeLost(1, "agent gone"))
    assert rig.only(act.CloseEpoch).cause == "node 1: agent gone"
    rig.reopened(g(7))
    rig.steps(8)
    assert rig.seat(0) == (0, 0, 0), "its process stays"
    assert rig.state.recoveries.finished[-1].phases["detect"] == pytest.approx(0.2)


def test_exception_of_a_process_that_does_not_end_closes_the_epoch():
    """As where the end of a process waits for its device; the second time it is the program."""
    rig = Rig().run(7)
    for number in (17, 23):
        rig.feed(raised(rig, text=f"ValueError: bad sample {number}"))
        rig.tick(1.1)
        assert f"raised ValueError: bad sample {number}" in rig.only(act.CloseEpoch).cause
        rig.feed(ev.MemberLost(*rig.seat(0), exit_code=1, last_line="ValueError: bad sample"))
        if number == 17:
            rig.reopened(g(7))
    assert rig.state.final is not None
    assert rig.state.final.kind == "bug"


def test_hang_counts_from_the_last_progress():
    rig = Rig().run()
    rig.feed(ev.RolesHung(1, (), "no progress", table_of({}), still_seconds=20.0))
    rig.reopened(g(7))
    rig.steps(8)
    assert rig.state.recoveries.finished[-1].phases["detect"] == pytest.approx(20.0)


def test_better_cause_that_arrives_late_is_the_cause():
    """Only for the end of the same epoch, not for failures of the next."""
    rig = Rig(spares=2).run()
    rig.feed(ev.MemberFault(0, 0, 0, 1, "connection reset"))
    rig.tick(0.6)
    rig.feed(ev.NodeLost(1, "agent gone"))
    rig.reopened(g(7))
    rig.lose(rig.seat(0)[0], g(7))
    rig.opened()
    rig.steps(8)
    (report,) = rig.state.recoveries.finished
    assert report.kind == "node-lost"
    assert [cause.split(":")[0] for cause in report.cause.split("; then ")] == [
        "node 1",
        "role 0",
        "node 0",
    ]


def test_dump_of_another_program_is_bad_input():
    rig = Rig(start=Restore("dump", g(7), "step", path="/dump/1-7"))
    rig.opening()
    rig.feed(ev.NotRestored(*rig.seat(1), 1, "", "of another model", other_program=True))
    end = rig.only(act.Finish)
    assert (end.exit_status, end.kind) == (2, "other-program")


def test_process_that_cannot_be_killed_costs_the_node():
    rig = Rig().run()
    rig.feed(ev.MemberSuspected(1, 0, 0, "no sign of life"))
    rig.closed(g(7))
    rig.tick(rig.settings.close_seconds + 0.1)
    assert rig.only(act.DropNode).node == 1
    assert nodes_of(rig.pending) == {0: 0, 1: 2}


def test_all_agents_gone_ends_the_coordinator():
    rig = Rig(nodes=1, spares=0, copies=1).run()
    rig.feed(ev.MemberDone(*rig.seat(0), 1))
    assert rig.state.phase is Phase.ENDING
    rig.feed(ev.NodeLost(0, "left"))
    assert rig.only(act.Exit).exit_status == 0
    assert rig.state.phase is Phase.ENDED
    rig.tick(1000)
    assert rig.last == []


# State that does not restore.


@pytest.mark.parametrize(("reporter", "part"), [(1, "main"), (0, "1/main")])
def test_part_that_cannot_be_fetched_is_not_relied_on_again(reporter, part):
    rig = Rig().run(7)
    rig.lose(1, g(6), g(7))
    rig.journal()
    rig.feed(ev.NotRestored(*rig.seat(reporter), 2, part, "checksum differs"))
    rig.tick(0.6)
    assert "checksum differs" in rig.only(act.CloseEpoch).cause
    rig.feed(rig.inventory(0, g(6), g(7)), rig.inventory(2, g(6)))
    assert rig.pending.restore.generation == g(6)
    assert BadPart(0, 1, g(7), "main") in rig.state.blame.bad_parts


def test_hashes_that_differ_twice_give_the_generation_up():
    rig = Rig().run(7)
    rig.feed(killed(rig, 1))
    for attempt, generation in ((2, g(7)), (3, g(7)), (4, g(6))):
        rig.decided(g(6), g(7))
        assert (rig.record.epoch, rig.record.restore.generation) == (attempt, generation)
        rig.feed(ev.NotRestored(*rig.seat(1), attempt, "", "hashes differ"))
        rig.tick(0.6)


# Giving up.


# No spare left.


def waiting(**more: object) -> Rig:
    rig = Rig(nodes=2, spares=0, **more).run()  # type: ignore[arg-type]
    rig.lose(1, g(6), g(7))
    assert rig.state.phase is Phase.WAITING_SPARE
    return rig


def test_lost_node_keeps_only_its_dumped_parts():
    rig = Rig(nodes=3, spares=0).run()
    rig.lose(2, g(6), g(7))
    rig.tick(rig.settings.spare_timeout_seconds)
    rig.feed(ev.Dumped(0, g(7)), ev.NodeLost(0, "gone"))
    assert rig.state.phase is Phase.DUMPING
    rig.feed(ev.Dumped(1, g(7), error="disk full"))
    assert rig.only(act.Finish).exit_status == 1


def test_wait_for_a_spare_is_a_phase_of_the_recovery():
    rig = waiting()
    began = rig.state.recoveries.current
    rig.now += 30.0
    rig.join(5)
    assert began is not None
    assert began.phases["wait"] == 30.0


def test_loss_of_the_last_node_ends_the_wait_for_a_spare():
    rig = waiting()
    rig.feed(ev.NodeLost(0, "gone"))
    assert rig.only(act.Finish).exit_status == 1
    assert rig.of(act.Exit)


@pytest.mark.parametrize("waits", [False, True])
def test_later_node_that_cannot_begin_the_program_is_excluded(waits):
    """It may run in another directory: the program is not at fault, and the wait continues."""
    rig = waiting() if waits else Rig(nodes=2, spares=0).run(7)
    for node in (5, 6, 7):
        rig.join(node)
        rig.feed(ev.MemberLost(node, 0, 0, exit_code=2, last_line="no such file: tiny.args"))
        (dropped,) = rig.of(act.DropNode)
        assert (dropped.node, dropped.excluded) == (node, True)
        assert "tiny.args" in dropped.cause
        assert not rig.of(act.Finish)
        if waits:  # the record that was being written had a seat there
            rig.journal()
            rig.closed(g(7))
        assert rig.state.phase is (Phase.WAITING_SPARE if waits else Phase.RUNNING)
