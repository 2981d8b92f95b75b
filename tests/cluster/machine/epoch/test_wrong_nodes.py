"""A node that was found to compute or hold wrong numbers has no role any more, whatever happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from deadpool_megatron.cluster.coordinator.succession.first_state import Estate, first_state
from deadpool_megatron.cluster.journal.entries import WRONG, DirectoryJournal, note_node
from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import EpochRecord, Inventory
from deadpool_megatron.preflight.facts import HostFacts
from tests.cluster.machine.gathering.test_takeover import CLOSED_BEFORE, rejoin, successor
from tests.cluster.machine.rig import Phase, Rig, g, nodes_of

R = TypeVar("R", bound=Rig)


def found_wrong(rig: R, *roles: int) -> R:
    rig.steps(3)
    rig.feed(ev.AuditFailed(*rig.seat(0), rig.record.epoch, 4, roles, True, "weights"))
    return rig


def recover(rig: Rig, iteration: int = 3) -> None:
    rig.reopened(g(iteration))


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
    rig.lose(3, g(3))
    waits_without(rig, 1)
    rig.join(4)
    assert nodes_of(rig.pending) == {0: 0, 1: 4, 2: 2}


def test_the_wait_of_a_wrong_nodes_roles_ends_with_the_state_saved() -> None:
    rig = found_wrong(Rig(nodes=3, spares=1).run(), 1)
    rig.lose(3, g(3))
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
    rig.lose(2, g(3), g(3, 2))
    waits_without(rig, 2)
    rig.join(4)
    assert nodes_of(rig.pending) == {0: 0, 1: 3, 2: 4}


def test_a_drained_node_is_one() -> None:
    rig = Rig(nodes=3, spares=1).run(3)
    rig.feed(ev.DrainRequested(1))
    pause = rig.one(act.Pause)
    rig.feed(*(ev.Paused(*rig.seat(r), 1, pause.iteration) for r in range(3)))
    recover(rig, pause.iteration)
    reap(rig)
    assert nodes_of(rig.record) == {0: 0, 1: 3, 2: 2}
    rig.lose(2, g(pause.iteration), g(pause.iteration, 2))
    assert nodes_of(rig.pending) == {0: 0, 1: 3, 2: 1}


@pytest.mark.parametrize("closed", [False, True])
def test_a_coordinator_that_takes_over_knows_of_a_wrong_node(closed: bool, tmp_path: Path) -> None:
    """Whether its order to close has come to the agents or not."""
    old = found_wrong(Rig(nodes=3, spares=1).run(), 1)
    rig, (note,) = successor(old), old.of(act.NoteWrong)
    journal = DirectoryJournal(tmp_path)
    journal.write("epoch", 1, old.record.to_dict())
    note_node(journal, WRONG, note.node, note.cause, host=note.host)
    rig.state = first_state(rig.machine, journal, Estate(), rig.now, pytest.fail)
    rejoin(rig, old, 0, 1, 2, 3, closed=int(closed))
    cause = "node 1 was put aside for the rest of the run"
    assert rig.one(act.CloseEpoch).cause == (CLOSED_BEFORE if closed else cause)
    rig.lose(3, g(3))
    assert rig.state.phase is Phase.WAITING_SPARE
    rig.join(5)
    assert nodes_of(rig.pending) == {0: 0, 1: 5, 2: 2}


def test_so_does_one_that_takes_over_long_after() -> None:
    old = found_wrong(Rig(nodes=3, spares=1).run(), 1)
    recover(old)
    rig = successor(old)
    rig.state = rig.machine.resume(EpochRecord.from_dict(old.record.to_dict()), (), rig.now)
    rejoin(rig, old, 0, 1, 2, 3)
    rig.restored()
    assert rig.state.phase is Phase.RUNNING
    rig.lose(2, g(3), g(3, 2))
    assert rig.state.phase is Phase.WAITING_SPARE


def test_all_nodes_among_which_an_error_began_are_put_aside() -> None:
    """Their replica is wrong for certain, which of the two is not: the run goes on without both."""
    rig = found_wrong(Rig(nodes=4, spares=2).run(), 2, 3)
    recover(rig)
    assert nodes_of(rig.record) == {0: 0, 1: 1, 2: 4, 3: 5}
    assert rig.state.fleet.wrong == {2, 3}


# Its host.

LEFT_OUT = "left out: host1 was put aside for the rest of this run"


class Hosts(Rig):
    """``host_of``: node -> name of its host; a host of its own for each of the others."""

    def __init__(self, nodes: int, spares: int, host_of: Mapping[int, str] | None = None) -> None:
        super().__init__(nodes, spares)
        self._host_of = host_of or {}

    def running(self) -> Hosts:
        """As :meth:`run`."""
        self.run()
        return self

    def join(self, *nodes: int, hosts: Sequence[str] = (), found: Inventory | None = None) -> None:
        for at, node in enumerate(nodes):
            name = hosts[at] if hosts else self._host_of.get(node, f"host{node}")
            address = "10.0.0.1", 1000 + node, f"node{node}"
            self.feed(ev.NodeJoined(node, *address, found=found, facts=HostFacts(name)))

    def dropped(self) -> list[act.DropNode]:
        return self.of(act.DropNode)


@pytest.mark.parametrize("spares", [0, 1])
def test_its_host_has_no_role_under_another_number_either(spares: int) -> None:
    rig = found_wrong(Hosts(3, spares).running(), 1)
    if spares:
        recover(rig)
        reap(rig)
        rig.feed(ev.NodeLost(1, "its agent was started anew"))
    else:
        rig.closed(g(3))
    rig.join(7, hosts=["host1"])
    assert rig.dropped() == [act.DropNode(7, LEFT_OUT, left_out=True)]
    assert 7 not in rig.state.fleet.nodes
    if not spares:
        rig.join(8, hosts=["host8"])
        assert nodes_of(rig.pending) == {0: 0, 1: 8, 2: 2}


def test_what_it_brings_is_taken_but_it_gets_no_role() -> None:
    rig = found_wrong(Hosts(3, 0).running(), 1)
    rig.closed(g(3))
    rig.join(7, hosts=["host1"], found=Inventory(7, 0, (), ()))
    rig.hello(7)
    assert not rig.dropped()
    assert rig.state.phase is Phase.WAITING_SPARE


def test_a_host_on_which_others_go_on_is_not_left_out() -> None:
    rig = found_wrong(Hosts(3, 1, {1: "big", 2: "big"}).running(), 1)
    recover(rig)
    rig.join(7, hosts=["big"])
    assert not rig.dropped()


def test_one_on_which_all_are_wrong_is() -> None:
    rig = found_wrong(Hosts(4, 2, {1: "host1", 2: "host1"}).running(), 1, 2)
    recover(rig)
    rig.join(7, hosts=["host1"])
    assert rig.dropped() == [act.DropNode(7, LEFT_OUT, left_out=True)]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_coordinator_that_takes_over_knows_its_host(recorded: bool, tmp_path: Path) -> None:
    """By the note in the journal, or by the newest record when there is one that says so."""
    old = found_wrong(Hosts(3, 1).running(), 1)
    (note,), first = old.of(act.NoteWrong), old.record
    journal = DirectoryJournal(tmp_path)
    journal.write("epoch", 1, first.to_dict())
    if recorded:
        recover(old)
        journal.write("epoch", 2, old.record.to_dict())
    else:
        note_node(journal, WRONG, note.node, note.cause, host=note.host)
    rig = Hosts(3, 1)
    rig.state = first_state(rig.machine, journal, Estate(), rig.now, pytest.fail)
    rig.join(7, hosts=["host1"])
    assert rig.dropped() == [act.DropNode(7, LEFT_OUT, left_out=True)]
