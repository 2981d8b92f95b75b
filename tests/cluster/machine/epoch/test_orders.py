"""Orderly changes (drain, new copies) and the account of where recovery time went."""

import pytest

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.recoveries import PHASES
from deadpool_megatron.events import Kind
from tests.cluster.machine.rig import Phase, Rig, g


def drained() -> Rig:
    """Nodes 0 and 1 train, 2 is a spare; drain of node 1 is asked for after iteration 7."""
    rig = Rig(nodes=2, spares=1).run(7)
    rig.feed(ev.DrainRequested(1))
    return rig


def test_cadence_restores_memory_before_a_newer_checkpoint():
    """A save may be nearer than the newest protected generation, which all hold in memory."""
    rig = Rig(cadence="10").run(23)
    rig.feed(ev.DurableValid(23, "/ck/23", "save"))
    rig.steps(24)
    rig.lose(1, g(10), g(20))
    assert (rig.pending.restore.kind, rig.pending.restore.generation) == ("memory", g(20))


def test_member_that_is_past_the_iteration_makes_it_later():
    rig = drained()
    rig.feed(ev.Paused(*rig.seat(0), 1, 9), ev.PauseRefused(*rig.seat(1), 1, 9))
    assert rig.only(act.Pause) == act.Pause(1, 11)
    rig.feed(ev.Paused(*rig.seat(1), 1, 9))
    assert rig.emitted(Kind.REFUSED)
    rig.feed(ev.PauseRefused(*rig.seat(1), 1, 9))  # an answer to the earlier order
    assert not rig.of(act.Pause)
    rig.feed(ev.Paused(*rig.seat(1), 1, 11))
    assert not rig.of(act.CloseEpoch), "role 0 stands still at the earlier one"
    rig.feed(ev.Paused(*rig.seat(0), 1, 11))
    assert rig.only(act.CloseEpoch)


def test_pause_that_takes_too_long_becomes_an_interrupt():
    rig = drained()
    rig.tick(rig.settings.hang_seconds)
    assert rig.only(act.CloseEpoch).cause == "drain of node 1"


def test_role_that_restored_another_generation_does_not_open_the_epoch():
    rig = drained()
    rig.feed(*(ev.Paused(*rig.seat(role), 1, 9) for role in (0, 1)))
    rig.decided(g(9))
    rig.feed(ev.Restored(*rig.seat(0), 2, g(9)), ev.Restored(*rig.seat(1), 2, g(8)))
    assert rig.state.phase is Phase.OPENING
    assert "role 1 restored" in str(rig.state.blame.suspicion)


@pytest.mark.parametrize(("role", "complete"), [(1, True), (0, False)])
@pytest.mark.parametrize("done_first", [False, True])
def test_pause_is_complete_when_each_role_is_paused_or_done(role, complete, done_first):
    """Role 0 pauses. A role that is done may have paused as well: it counts once."""
    rig = drained()
    events = [ev.Paused(*rig.seat(0), 1, 9), ev.MemberDone(*rig.seat(role), 1)]
    first, last = reversed(events) if done_first else events
    rig.feed(first)
    assert not rig.of(act.CloseEpoch)
    rig.feed(last)
    assert bool(rig.of(act.CloseEpoch)) == complete


def test_roles_paused_at_two_iterations_pause_again():
    """A later coordinator learns of it, and the lagging role continues to the later iteration."""
    rig = Rig(nodes=2).opening()
    rig.feed(ev.Paused(*rig.seat(0), 1, 9), ev.Paused(*rig.seat(1), 1, 11))
    rig.restored()
    assert rig.only(act.Pause).iteration == 11
    assert not rig.of(act.CloseEpoch)


def wanted_dump(seconds: float | None = None) -> Rig:
    rig = Rig(nodes=2, spares=1).run(7)
    rig.feed(ev.DumpRequested("time is over", seconds))
    return rig


@pytest.mark.parametrize(
    ("early", "durable", "status", "reason"),
    [
        ("", "", 0, ""),
        ("4 of 40 iterations", "/K/4", 75, "at 4 of 40 iterations, continues from /K/4"),
        ("4 of 40 iterations", "", 1, "at 4 of 40 iterations, and there is no checkpoint"),
    ],
)
def test_run_of_an_ended_program_continues_from_its_checkpoint(early, durable, status, reason):
    """Its last checkpoint may become valid when all roles are done."""
    rig = Rig().run()
    rig.feed(*(ev.MemberDone(*rig.seat(role), 1, early) for role in (0, 1)))
    finish = rig.only(act.Finish)
    assert rig.state.standing_epoch == 1, "what it has saved counts"
    if durable:
        rig.feed(ev.DurableValid(4, durable))
    end = finish.with_checkpoint(rig.state.lineage.durable)
    assert (end.exit_status, reason in end.reason) == (status, True)


def test_unwritten_last_checkpoint_becomes_a_dump():
    rig = Rig(nodes=2, spares=1).run(9)
    unsaved = ("", "/K/iter_0000009: No space left on device")
    rig.feed(ev.MemberDone(*rig.seat(0), 1, *unsaved), ev.MemberDone(*rig.seat(1), 1, "", "/K: "))
    assert rig.state.standing_epoch == 1, "it is no failure"
    rig.closed(g(9))
    rig.feed(*(ev.Dumped(node, g(9)) for node in (0, 1, 2)))
    finish = rig.only(act.Finish)
    assert finish.exit_status == 75
    wanted = f"training is complete, its checkpoint was not written: {unsaved[1]}; state dumped to"
    assert finish.reason.startswith(wanted)


def test_failed_epoch_is_not_the_standing_epoch():
    rig = Rig().run()
    rig.feed(ev.NodeLost(1, "gone"))
    assert rig.state.standing_epoch is None


def test_dump_of_another_boundary_does_not_count():
    """An earlier coordinator ordered it, before an evaluation of the same iteration."""
    rig = wanted_dump()
    rig.feed(*(ev.Paused(*rig.seat(role), 1, 9) for role in (0, 1)))
    rig.closed(g(9))
    rig.feed(*(ev.Dumped(node, g(9), boundary="evaluation") for node in (0, 1, 2)))
    assert not rig.of(act.Finish)
    rig.feed(*(ev.Dumped(node, g(9), boundary="step") for node in (0, 1, 2)))
    assert rig.only(act.Finish).exit_status == 75


def test_wanted_dump_before_the_first_record_was_announced():
    rig = Rig(nodes=2, spares=1)
    rig.gather()
    rig.feed(ev.DumpRequested("time is over"))
    rig.journal()
    assert not rig.of(act.Announce)
    assert rig.only(act.Finish).exit_status == 75


def test_new_node_that_can_hold_missing_copies_is_taken_in():
    rig = Rig(nodes=2, spares=0, copies=2).run()
    assert rig.record.fewer_copies == {0, 1}
    rig.join(7)
    assert rig.only(act.Welcome).record == rig.record
    assert rig.only(act.Pause)
    rig.feed(*(ev.Paused(*rig.seat(role), 1, 2) for role in (0, 1)))
    assert rig.awaited == {0, 1}
    rig.closed(g(2))
    assert rig.pending.fewer_copies == frozenset()
    assert rig.pending.seats == rig.record.seats


def test_account_of_a_recovery():
    rig = Rig(nodes=2, spares=1).run(7)
    rig.now += 10
    rig.feed(ev.NodeLost(1, "silent", silent_seconds=2.0))
    rig.now += 0.5
    rig.closed(g(6))
    rig.now += 0.25
    rig.journal()
    rig.feed(
        ev.PhaseReported(2, "rebuild", 0.5),
        ev.PhaseReported(2, "rebuild", 1.5),
        ev.PhaseReported(2, "restore", 0.75),
        ev.PhaseReported(1, "restore", 99.0),
        ev.PhaseReported(2, "reprotect", 3.0, exposed=3.0),
    )
    rig.now += 1.5  # of different roles, at the same time
    rig.restored()
    rig.now += 4
    rig.steps(6)
    assert not rig.state.recoveries.finished
    rig.steps(7)
    (report,) = rig.state.recoveries.finished
    assert report.phases == {
        **dict.fromkeys(PHASES, 0.0),
        "detect": 2.0,
        "close": 0.5,
        "decide": 0.25,
        "rebuild": 1.0,
        "restore": 0.5,
        "reprotect": 3.0,
        "replay": 4.0,
    }
    assert report.seconds == pytest.approx(2 + 0.5 + 0.25 + 1.5 + 4)
    assert report.steps_recomputed == 1
    assert report.exposed_seconds == 3.0
    assert report.to_dict()["seats_changed"] == {"1": [[1, 0, 0], [2, 0, 0]]}
    (emitted,) = rig.emitted(Kind.RECOVERED)
    assert emitted.data["cause"] == "node 1: silent"
    rig.feed(ev.PhaseReported(2, "reprotect", 5.0, exposed=5.0))
    assert rig.state.recoveries.finished[0].phases["reprotect"] == 5.0, "the slowest role counts"
    assert rig.state.recoveries.finished[0].exposed_seconds == 5.0
