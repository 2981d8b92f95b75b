"""Kinds of failure in the state machine: repeated failures, and losses that are not finite."""

from copy import deepcopy

import pytest

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.watch.hang import table_of
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation, Restore
from tests.cluster.machine.bootstrapping.test_takeover import rejoin
from tests.cluster.machine.rig import Phase, Rig, g, killed, nodes_of

CUDA = "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered"
FULL = "no room for own-1-1.0.4.seg: 4096 bytes needed on /dev/shm/deadpool-1/node1 (shared memory"


def ended(rig: Rig, role: int, line: str) -> ev.MemberLost:
    return ev.MemberLost(*rig.seat(role), exit_code=1, last_line=line)


def recover(rig: Rig, iteration: int) -> None:
    """Go from a closed epoch to the next, which restores ``iteration``."""
    rig.closed(*(g(iteration, lineage) for lineage in range(1, rig.record.epoch + 1)))
    rig.opened()


def kinds(rig: Rig, kind: Kind) -> list[str]:
    return [str(e.data["kind"]) for e in rig.of(act.EmitEvent, rig.log) if e.kind is kind]


@pytest.mark.parametrize(("line", "kind"), [(CUDA, "device-error"), (FULL, "no-room")])
def test_second_error_of_a_host_moves_its_roles_to_a_spare(line, kind):
    rig = Rig().run(3)
    for _ in range(2):
        assert nodes_of(rig.record) == {0: 0, 1: 1}
        rig.feed(ended(rig, 1, line))
        recover(rig, 3)
    assert nodes_of(rig.record) == {0: 0, 1: 2}
    assert kinds(rig, Kind.NODE_QUARANTINED) == [kind]
    assert rig.state.fleet.deprioritized == {1}


def crash_and_go_on(rig: Rig, iteration: int, pause_seconds: float) -> None:
    rig.feed(killed(rig, 1, 11))
    recover(rig, iteration)
    rig.steps(iteration + 1)
    rig.now += pause_seconds


def test_old_crashes_do_not_count_against_a_node():
    rig = Rig(restarts_in_place=3).run(1)
    for n in range(1, 9):
        crash_and_go_on(rig, n, pause_seconds=301)
    assert nodes_of(rig.record) == {0: 0, 1: 1}
    assert rig.state.fleet.nodes[1].restarts == 8


def test_node_without_a_spare_continues_until_its_restarts_are_used_up():
    rig = Rig(spares=0, restarts_in_place=4).run(1)
    for n in range(1, 5):
        crash_and_go_on(rig, n, pause_seconds=1)
    assert 1 in rig.state.fleet.nodes
    rig.feed(killed(rig, 1, 11))
    assert 1 not in rig.state.fleet.nodes


def test_end_after_three_hangs_shows_the_stack_of_the_culprit():
    rig = Rig().run(7)
    for n in range(3):
        cause = "no progress of any role for 300.0 s"
        rig.feed(ev.RolesHung(rig.record.epoch, (1,), cause, table_of({})))
        if n < 2:
            assert rig.only(act.KillMember).hung
            rig.feed(ev.StackReported(f"stack of role 1: wait (x.py:{n})"))
            rig.feed(ev.MemberLost(*rig.seat(1), signal=9, ordered=True))
            recover(rig, 7)
    rig.feed(ev.MemberLost(*rig.seat(1), signal=9, ordered=True))
    end = rig.saved_end(g(7))
    assert end.kind == "bug"
    assert "stack of role 1: wait (x.py:1)" in end.reason


# Losses that are not finite.


def nan(rig: Rig, iteration: int) -> list[act.Action]:
    return rig.feed(ev.NotFinite(rig.record.epoch, 1, 1, iteration, "loss", "nan"))


def test_nan_stops_the_run_with_the_state_before_it():
    rig = Rig().run(4)
    rig.feed(ev.DurableValid(3, "/saves/iter_3"))
    nan(rig, 5)
    end = rig.saved_end(g(4), g(5))
    assert (end.exit_status, end.kind) == (4, "nonfinite-loss")
    for part in ("iteration 5 is nan", "seen by role 1", "/dump/1-4"):
        assert part in end.reason, part


def test_nan_with_ignore_is_a_step_like_any_other():
    rig = Rig(nonfinite="ignore").run()
    nan(rig, 5)
    assert (rig.state.lineage.newest, rig.state.phase) == (5, Phase.RUNNING)


def test_rollback_restores_nothing_of_the_iteration_or_later():
    rig = Rig(nonfinite="rollback").run(4)
    nan(rig, 5)
    rig.closed(g(4), g(5), g(6))
    assert rig.pending.restore.generation == g(4)
    assert rig.pending.history.failures[-1]["kind"] == "nonfinite-loss"
    rig.journal()
    (decided,) = rig.emitted(Kind.EPOCH_DECIDED)
    assert decided.data["forgotten_from"] == 5
    rig.restored()
    rig.steps(5)
    assert rig.state.phase is Phase.RUNNING
    rig.kill(0, g(4), g(5, 2))
    assert rig.pending.restore.generation == g(5, 2), "computed anew, it is good"


def test_rollback_does_not_take_a_checkpoint_of_the_bad_iteration():
    rig = Rig(nonfinite="rollback").run(4)
    rig.feed(ev.DurableValid(5, "/saves/iter_5"))
    nan(rig, 5)
    rig.closed(g(5))
    assert rig.only(act.Finish).exit_status == 1


def test_checkpoint_of_the_bad_iteration_is_not_taken_after_the_rollback():
    rig = Rig(nodes=2, spares=2, nonfinite="rollback").run(4)
    rig.feed(ev.DurableValid(5, "/saves/iter_5"))
    nan(rig, 5)
    recover(rig, 4)
    rig.feed(ev.NodeLost(0, "gone"), ev.NodeLost(1, "gone"))
    rig.closed()
    assert rig.only(act.Finish).exit_status == 1


def test_second_nan_at_the_same_iteration_stops():
    rig = Rig(nonfinite="rollback").run(4)
    nan(rig, 5)
    recover(rig, 4)
    nan(rig, 5)
    end = rig.saved_end(g(4), g(5, 2))
    assert end.resume is not None
    assert end.resume.generation == g(4)
    assert end.exit_status == 4
    assert "before" in end.reason


def test_second_nan_discards_the_generation_before_it():
    """Nothing had shown in the iteration that made it; a checkpoint before it is left."""
    rig = Rig(nonfinite="rollback").run(3)
    rig.feed(ev.DurableValid(3, "/saves/iter_3"))
    rig.steps(4)
    nan(rig, 5)
    recover(rig, 4)
    nan(rig, 5)
    rig.closed(g(4), g(5, 2))
    assert (rig.pending.restore.kind, rig.pending.restore.path) == ("durable", "/saves/iter_3")
    assert set(rig.pending.history.nonfinite) == {4, 5}
    rig.opened()
    rig.steps(4)
    nan(rig, 5)
    end = rig.saved_end(g(3, 3), g(4, 3))
    assert end.resume is not None
    assert (end.exit_status, end.resume.generation) == (4, g(4, 3))


def test_nan_reported_by_other_roles_changes_nothing():
    rig = Rig(nonfinite="rollback").run(4)
    nan(rig, 5)
    before = deepcopy(rig.state)
    rig.feed(ev.NotFinite(rig.record.epoch, 0, 0, 5, "gradient norm", "nan"))
    assert rig.state == before
    assert not rig.emitted(Kind.NONFINITE)
    assert not rig.emitted(Kind.REFUSED)


@pytest.mark.parametrize(("epoch", "iteration"), [(1, 5), (2, 0)])
def test_nan_of_an_abandoned_or_initial_iteration_is_refused(epoch, iteration):
    rig = Rig(nonfinite="rollback").run(4)
    rig.feed(killed(rig, 0))
    recover(rig, 4)
    before = deepcopy(rig.state)
    rig.feed(ev.NotFinite(epoch, 1, 1, iteration, "loss", "nan"))
    assert rig.emitted(Kind.REFUSED)
    assert rig.state == before


@pytest.mark.parametrize(("epoch", "is_late"), [(1, True), (9, False)])
def test_input_of_a_closed_epoch_is_refused_as_late(epoch, is_late):
    rig = Rig().run(4)
    rig.feed(killed(rig, 0))
    recover(rig, 4)
    rig.feed(ev.MemberFault(1, 0, 0, epoch, "text"))
    assert [bool(event.data.get("late")) for event in rig.emitted(Kind.REFUSED)] == [is_late]


@pytest.mark.parametrize("until", [Phase.CLOSING, Phase.DECIDING, Phase.OPENING, Phase.RUNNING])
def test_nan_reported_after_the_close_is_not_restored(until):
    """Another role died at the same time; all roles have committed the iteration by then."""
    rig = Rig(nonfinite="rollback").run(4)
    rig.feed(killed(rig, 0))
    if until is not Phase.CLOSING:
        rig.closed(g(4), g(5))
    if until in (Phase.OPENING, Phase.RUNNING):
        rig.journal()
    if until is Phase.RUNNING:
        rig.restored()
    assert rig.state.phase is until
    rig.feed(ev.NotFinite(1, 1, 1, 5, "loss", "nan"))
    if until is Phase.DECIDING:
        rig.journal()
    else:
        rig.closed(g(4), g(5))
    assert rig.pending.restore.generation == g(4)
    assert set(rig.pending.history.nonfinite) == {5}


def test_nan_known_to_a_dead_coordinator_is_not_restored():
    """All agents had closed the epoch; the last to rejoin reports it again."""
    old = Rig(nodes=2, spares=0, nonfinite="rollback").run(4)
    nan(old, 5)
    rig = old.successor()
    rejoin(rig, old, 0, 1, closed=1)
    rig.feed(ev.NotFinite(1, 1, 1, 5, "loss", "nan"))
    rig.closed(g(4), g(5))
    assert rig.pending.restore.generation == g(4)


def test_takeover_does_not_trust_the_checkpoint_of_a_bad_iteration():
    """That checkpoint is the newest until the iteration is saved again."""
    rig = Rig(nonfinite="rollback").run(4)
    nan(rig, 5)
    recover(rig, 4)

    def durable(found: Generation) -> Restore | None:
        restore = Restore("durable", found, "save", "/saves")
        return next(iter(rig.successor(restore).state.lineage.valid), None)

    assert durable(g(5)) is durable(g(6)) is None
    for good in (g(4), g(5, 2)):
        found = durable(good)
        assert found is not None
        assert found.generation == good
