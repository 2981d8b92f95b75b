"""Doubt sticks to the checkpoint that is doubted: it is struck off, an older one is tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.layout.records import EpochRecord, Restore
from tests.cluster.machine.rig import Phase, Rig, g


def fallen_back(*saved: int, gone: tuple[int, ...] = ()) -> Rig:
    """All copies are lost after these iterations were saved; both spares have come in."""
    rig = Rig(nodes=2, spares=2).run()
    rig.feed(*(ev.DurableValid(k, f"/ck/{k}") for k in saved))
    rig.steps(35)
    rig.gone = frozenset(f"/ck/{k}" for k in gone)
    rig.feed(ev.NodeLost(0, "gone"), ev.NodeLost(1, "gone"))
    return decided(rig)


def decided(rig: Rig) -> Rig:
    """Nobody holds anything any more."""
    rig.closed()
    if rig.state.phase is Phase.DECIDING:
        rig.journal()
    return rig


def fails(rig: Rig, role: int = 0) -> Rig:
    rig.feed(ev.RestoreFailed(*rig.seat(role), rig.record.epoch, "", "cannot be loaded: OSError"))
    rig.tick(0.6)
    return decided(rig)


def path(rig: Rig) -> str:
    return rig.record.restore.path


def told(rig: Rig) -> str:
    return "\n".join(str(one.data.get("text")) for one in rig.of(act.EmitEvent, rig.log))


@pytest.mark.parametrize(
    ("gone", "found"), [((), 30), ((30,), 20), ((20,), 30), ((30, 20), 10), ((30, 10), 20)]
)
def test_what_is_gone_is_not_decided_on(gone: tuple[int, ...], found: int) -> None:
    rig = fallen_back(10, 30, 20, gone=gone)
    assert (path(rig), rig.record.restore.generation.iteration) == (f"/ck/{found}", found)
    assert rig.record.epoch == 2, "nobody has tried the others"
    for k in gone:
        assert f"checkpoint /ck/{k} is not there any more" in told(rig)


def test_a_look_that_is_not_answered_holds_nobody_up() -> None:
    rig = fallen_back(10)
    rig.state, _ = rig.machine.step(rig.state, ev.NodeLost(2, "gone"), rig.now)
    rig.state, actions = rig.machine.step(rig.state, ev.NodeLost(3, "gone"), rig.now)
    assert rig.state.phase is Phase.CLOSING
    assert rig.state.waiting_for() == "a look at the checkpoints"
    assert rig.of(act.LookAtCheckpoints, actions)
    rig.tick(rig.settings.gather_seconds + 0.1)
    assert rig.state.phase is Phase.WAITING_SPARE


def test_the_next_older_one_is_tried_whoever_speaks_first() -> None:
    rig = fallen_back(10, 20, 30)
    assert path(fails(rig, 0)) == "/ck/20"
    assert "checkpoint /ck/30 is struck off: role 0 cannot be restored" in told(rig)
    assert path(fails(rig, 1)) == "/ck/10"
    # The last one that is left gets a second try, and a third is no use whoever asks for it.
    assert path(fails(rig, 1)) == "/ck/10"
    fails(rig, 0)
    (finish,) = rig.of(act.Finish, rig.log)
    assert finish.exit_status == 1
    assert "could not be loaded: /ck/10, /ck/20, /ck/30" in finish.reason


def test_a_successor_knows_what_was_struck_off_and_what_has_replaced_it() -> None:
    rig = fallen_back(10, 20)
    assert path(fails(rig)) == "/ck/10"
    record = EpochRecord.from_dict(rig.record.to_dict())
    noted = [Restore("durable", g(k), "save", f"/ck/{k}") for k in (20, 10)]
    successor = rig.machine.resume(record, noted, rig.now).line
    assert [one.path for one in successor.valid] == ["/ck/10"]
    rig.feed(ev.DurableValid(20, "/ck/20"))
    assert [one.path for one in rig.state.line.valid] == ["/ck/20", "/ck/10"]
    assert not rig.state.line.struck


def test_a_better_cause_strikes_nothing_off() -> None:
    rig = fallen_back(10, 20)
    rig.feed(ev.RestoreFailed(*rig.seat(0), rig.record.epoch, "", "cannot be loaded: OSError"))
    rig.feed(ev.NodeLost(3, "gone"))
    assert not rig.state.line.struck


def test_the_last_line_names_one_that_is_there() -> None:
    rig = fallen_back(10, 20)
    rig.gone = frozenset({"/ck/20"})
    rig.feed(ev.NodeLost(2, "gone"))
    decided(rig)
    rig.tick(rig.settings.spare_timeout_seconds + 1)
    (finish,) = rig.of(act.Finish, rig.log)
    assert "the newest checkpoint is /ck/10" in finish.reason
    assert finish.resume is not None
    assert (finish.exit_status, finish.resume.path) == (75, "/ck/10")


def test_a_start_falls_back_as_a_recovery_does() -> None:
    """``--resume`` has found several."""
    old = [Restore("durable", g(k), "save", f"/ck/{k}") for k in (40, 30)]
    rig = Rig(start=old[0])
    rig.machine = Machine(replace(rig.config, older=(old[1],)))
    rig.state = rig.machine.start(rig.now)
    rig.gather()
    rig.journal()
    assert path(rig) == "/ck/40"
    assert path(fails(rig, 1)) == "/ck/30"


def test_a_state_that_nobody_can_begin_with_is_given_up_whoever_speaks_first() -> None:
    rig = Rig().opening()
    for role in (0, 1, 0):
        fails(rig, role)
    (finish,) = rig.of(act.Finish, rig.log)
    assert "3 times the same failure" in finish.reason
