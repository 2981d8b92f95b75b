"""A node that was found to compute or hold wrong numbers has no role any more, whatever happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.cluster.coordinator.succession.first_state import Estate, first_state
from deadpool_megatron.cluster.journal.entries import WRONG, DirectoryJournal, note_node
from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import EpochRecord
from tests.cluster.machine.gathering.test_takeover import CLOSED_BEFORE, rejoin, successor
from tests.cluster.machine.rig import Phase, Rig, g, nodes_of


def found_wrong(rig: Rig, *roles: int) -> Rig:
    rig.steps(3)
    rig.feed(ev.AuditFailed(*rig.seat(0), rig.record.epoch, 4, roles, True, "weights"))
    return rig


def recover(rig: Rig, iteration: int = 3) -> None:
    rig.closed(g(iteration))
    rig.journal()
    rig.restored()


def reap(rig: Rig) -> None:
    """What was killed to serve as a fresh spare is started again."""
    members = rig.state.fleet.members
    for place in sorted(members.killed):
        incarnation = members[place].incarnation
        rig.feed(ev.MemberLost(*place, incarnation, signal=9, ordered=True))
    rig.warm(*(node for node, _ in members.killed))


def waits_without(rig: Rig, *roles: int) -> None:
    assert rig.state.phase is Phase.WAITING_SPARE
    (told,) = (e for e in rig.of(act.EmitEvent, rig.log) if e.kind is Kind.WAITING_FOR_SPARE)
    assert told.data["text"] == f"roles {list(roles)} wait for a spare node to join"


def test_a_wrong_node_has_no_role_when_its_spare_is_lost_while_closing() -> None:
    rig = found_wrong(Rig(nodes=3, spares=1).run(), 1)
    rig.feed(ev.NodeLost(3, "gone"))
    rig.closed(g(3))
    waits_without(rig, 1)
    rig.join(4)
    assert nodes_of(rig.pending) == {0: 0, 1: 4, 2: 2}


def test_the_wait_of_a_wrong_nodes_roles_ends_with_the_state_saved() -> None:
    rig = found_wrong(Rig(nodes=3, spares=1).run(), 1)
    rig.feed(ev.NodeLost(3, "gone"))
    rig.closed(g(3))
    rig.tick(rig.settings.spare_timeout_seconds + 1)
    dump = rig.one(act.Dump)
    assert dump.generation == g(3)
    rig.feed(*(ev.Dumped(node, g(3)) for node in dump.nodes))
    if exported := rig.of(act.ExportDump):
        rig.feed(ev.DumpExported(exported[0].restore.generation, ""))
    end = rig.one(act.Finish)
    assert (end.exit_status, end.kind) == (75, "")
    assert "no spare node for" in end.reason


def test_of_two_wrong_nodes_with_one_spare_neither_has_a_role() -> None:
    rig = found_wrong(Rig(nodes=5, spares=1).run(), 1, 3)
    rig.closed(g(3))
    waits_without(rig, 3)
    rig.join(6)
    assert nodes_of(rig.pending) == {0: 0, 1: 5, 2: 2, 3: 6, 4: 4}


def test_a_wrong_node_is_no_last_resort_either() -> None:
    rig = found_wrong(Rig(nodes=3, spares=1).run(), 1)
    recover(rig)
    reap(rig)
    assert nodes_of(rig.record) == {0: 0, 1: 3, 2: 2}
    rig.feed(ev.NodeLost(2, "gone"))
    rig.closed(g(3), g(3, 2))
    waits_without(rig, 2)
    rig.join(4)
    assert nodes_of(rig.pending) == {0: 0, 1: 3, 2: 4}


def test_a_drained_node_is_one() -> None:
    rig = Rig(nodes=3, spares=1).run()
    rig.steps(3)
    rig.feed(ev.DrainRequested(1))
    pause = rig.one(act.Pause)
    rig.feed(*(ev.Paused(*rig.seat(r), 1, pause.iteration) for r in range(3)))
    recover(rig, pause.iteration)
    reap(rig)
    assert nodes_of(rig.record) == {0: 0, 1: 3, 2: 2}
    rig.feed(ev.NodeLost(2, "gone"))
    rig.closed(g(pause.iteration), g(pause.iteration, 2))
    assert nodes_of(rig.pending) == {0: 0, 1: 3, 2: 1}


@pytest.mark.parametrize("closed", [False, True])
def test_a_coordinator_that_takes_over_knows_of_a_wrong_node(closed: bool, tmp_path: Path) -> None:
    """Whether its order to close has come to the agents or not."""
    old = found_wrong(Rig(nodes=3, spares=1).run(), 1)
    rig, (note,) = successor(old), old.of(act.NoteWrong)
    journal = DirectoryJournal(tmp_path)
    journal.write("epoch", 1, old.record.to_dict())
    note_node(journal, WRONG, note.node, note.cause)
    rig.state = first_state(rig.machine, journal, Estate(), rig.now)
    rejoin(rig, old, 0, 1, 2, 3, closed=int(closed))
    cause = "node 1 was put aside for the rest of the run"
    assert rig.one(act.CloseEpoch).cause == (CLOSED_BEFORE if closed else cause)
    rig.feed(ev.NodeLost(3, "gone"))
    rig.closed(g(3))
    assert rig.state.phase is Phase.WAITING_SPARE
    rig.join(5)
    assert nodes_of(rig.pending) == {0: 0, 1: 5, 2: 2}


def test_so_does_one_that_takes_over_long_after() -> None:
    old = found_wrong(Rig(nodes=3, spares=1).run(), 1)
    recover(old)
    rig = successor(old)
    rig.state = rig.machine.resume(EpochRecord.from_dict(old.record.to_dict()), None, rig.now)
    rejoin(rig, old, 0, 1, 2, 3)
    rig.restored()
    assert rig.state.phase is Phase.RUNNING
    rig.feed(ev.NodeLost(2, "gone"))
    rig.closed(g(3), g(3, 2))
    assert rig.state.phase is Phase.WAITING_SPARE
