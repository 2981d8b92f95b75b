"""Suspects stay suspect: a checkpoint, a device, a node that computes wrong numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import pytest

from deadpool_megatron.cluster.coordinator.succession import RecoveredState, begin
from deadpool_megatron.cluster.journal.journal import Journal, note as write_note
from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.events import Kind
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.layout.records import EpochRecord, Inventory, Restore
from deadpool_megatron.preflight.eligibility import HostFacts
from tests.cluster.machine.bootstrapping.test_takeover import rejoin
from tests.cluster.machine.epoch.test_kinds import CUDA, ended, kinds, recover
from tests.cluster.machine.rig import Phase, Rig, g, nodes_of

GONE = "deadpool: no GPU for this process: AssertionError: Torch not compiled with CUDA enabled"
R = TypeVar("R", bound=Rig)
EXCLUDED = "excluded: host1 was quarantined for the rest of this run"


def fallen_back(*saved: int, gone: tuple[int, ...] = ()) -> Rig:
    """All copies are lost after these iterations were saved; both spares have come in."""
    rig = Rig(nodes=2, spares=2).run()
    rig.feed(*(ev.DurableValid(k, f"/ck/{k}") for k in saved))
    rig.steps(35)
    rig.gone = frozenset(f"/ck/{k}" for k in gone)
    rig.feed(ev.NodeLost(0, "gone"), ev.NodeLost(1, "gone"))
    return decided(rig)


def decided(rig: Rig) -> Rig:
    """Close the epoch with empty memory."""
    rig.closed()
    if rig.state.phase is Phase.DECIDING:
        rig.journal()
    return rig


def fails(rig: Rig, role: int = 0) -> Rig:
    rig.feed(ev.NotRestored(*rig.seat(role), rig.record.epoch, "", "cannot be loaded: OSError"))
    rig.tick(0.6)
    return decided(rig)


def path(rig: Rig) -> str:
    return rig.record.restore.path


def texts(rig: Rig) -> str:
    return "\n".join(str(event.data.get("text")) for event in rig.of(act.EmitEvent, rig.log))


@pytest.mark.parametrize(
    ("gone", "found"), [((), 30), ((30,), 20), ((20,), 30), ((30, 20), 10), ((30, 10), 20)]
)
def test_missing_checkpoints_are_not_restored(gone, found):
    rig = fallen_back(10, 30, 20, gone=gone)
    assert (path(rig), rig.record.restore.generation.iteration) == (f"/ck/{found}", found)
    assert rig.record.epoch == 2, "the others were not tried"
    for k in gone:
        assert f"checkpoint /ck/{k} does not exist any more" in texts(rig)


def test_unanswered_inspection_of_checkpoints_delays_nothing():
    rig = fallen_back(10)
    rig.machine.handle(ev.NodeLost(2, "gone"), rig.now)
    actions = rig.machine.handle(ev.NodeLost(3, "gone"), rig.now)
    assert rig.state.phase is Phase.CLOSING
    assert rig.state.waiting_for() == "a look at the checkpoints"
    assert rig.of(act.InspectCheckpoints, actions)
    rig.tick(rig.settings.gather_seconds + 0.1)
    assert rig.state.phase is Phase.WAITING_SPARE


def test_next_older_checkpoint_is_tried_whichever_role_reports_first():
    rig = fallen_back(10, 20, 30)
    assert path(fails(rig, 0)) == "/ck/20"
    assert "checkpoint /ck/30 is not used any more: role 0 cannot be restored" in texts(rig)
    assert path(fails(rig, 1)) == "/ck/10"
    # The only checkpoint left gets a second try, but no third, whichever role fails.
    assert path(fails(rig, 1)) == "/ck/10"
    fails(rig, 0)
    (finish,) = rig.of(act.Finish, rig.log)
    assert finish.exit_status == 1
    assert "could not be loaded: /ck/10, /ck/20, /ck/30; at the last try role 0" in finish.reason
    assert finish.reason.endswith("cannot be loaded: OSError")


def test_takeover_knows_invalidated_checkpoints_and_their_replacements():
    rig = fallen_back(10, 20)
    assert path(fails(rig)) == "/ck/10"
    record = EpochRecord.from_dict(rig.record.to_dict())
    noted = [Restore("durable", g(k), "save", f"/ck/{k}") for k in (20, 10)]
    rig.take_over(record, noted)
    assert [restore.path for restore in rig.state.lineage.valid] == ["/ck/10"]
    rig.feed(ev.DurableValid(20, "/ck/20"))
    assert [restore.path for restore in rig.state.lineage.valid] == ["/ck/20", "/ck/10"]
    assert not rig.state.lineage.invalidated


def test_better_cause_invalidates_no_checkpoint():
    rig = fallen_back(10, 20)
    rig.feed(ev.NotRestored(*rig.seat(0), rig.record.epoch, "", "cannot be loaded: OSError"))
    rig.feed(ev.NodeLost(3, "gone"))
    assert not rig.state.lineage.invalidated


def test_final_reason_names_an_existing_checkpoint():
    rig = fallen_back(10, 20)
    rig.gone = frozenset({"/ck/20"})
    rig.feed(ev.NodeLost(2, "gone"))
    decided(rig)
    rig.tick(rig.settings.spare_timeout_seconds + 1)
    (finish,) = rig.of(act.Finish, rig.log)
    assert "the newest checkpoint is /ck/10" in finish.reason
    assert finish.resume is not None
    assert (finish.exit_status, finish.resume.path) == (75, "/ck/10")


def test_unloadable_initial_state_ends_the_run_whichever_role_reports_first():
    rig = Rig().opening()
    for role in (0, 1, 0):
        fails(rig, role)
    (finish,) = rig.of(act.Finish, rig.log)
    assert "3 times the same failure" in finish.reason


def finds_none(rig: Rig, node: int, slot: int = 0) -> list[act.Action]:
    incarnation = rig.state.fleet.members[node, slot].incarnation
    return rig.feed(
        ev.MemberLost(node, slot, incarnation, exit_code=ExitStatus.NO_DEVICE, last_line=GONE)
    )


@pytest.mark.parametrize("until", [Phase.CLOSING, Phase.DECIDING, Phase.OPENING, Phase.RUNNING])
def test_lost_device_moves_the_roles_of_its_node_at_once(until):
    """Its predecessor has died of the device; the successor finds out while the epoch is closed, or
    the next is decided, opened or run."""
    rig = Rig(nproc=2).run(3)
    rig.feed(ended(rig, 2, CUDA))
    if until is not Phase.CLOSING:
        rig.closed(g(3))
    if until in (Phase.OPENING, Phase.RUNNING):
        rig.journal()
    if until is Phase.RUNNING:
        rig.restored()
    assert rig.state.phase is until
    finds_none(rig, 1)
    assert not rig.of(act.StartMembers), "a replacement would find none either"
    if until is Phase.DECIDING:
        rig.journal()
    if rig.state.phase is Phase.CLOSING:
        rig.closed(g(3), g(3, 2))
    rig.opened()
    assert rig.state.phase is Phase.RUNNING
    assert nodes_of(rig.record) == {0: 0, 1: 0, 2: 2, 3: 2}
    assert rig.record.history.quarantined == {1}
    assert kinds(rig, Kind.NODE_QUARANTINED) == ["device-error"]


def test_devices_lost_within_a_step_are_not_the_programs_fault():
    rig = Rig(nodes=2, spares=3).run(3)
    for node in (1, 2, 3):
        finds_none(rig, node)
        recover(rig, 3)
    assert nodes_of(rig.record) == {0: 0, 1: 4}
    assert rig.state.final is None
    assert not rig.record.history.failures


def test_run_begins_without_a_node_that_has_no_device():
    """Both of its processes report it before the spare joins, which another node then needs."""
    rig = Rig(nproc=2)
    rig.join(0, 1)
    finds_none(rig, 1, 1)
    finds_none(rig, 1, 0)
    rig.join(2)
    rig.hello(0, 2)
    assert nodes_of(rig.pending) == {0: 0, 1: 0, 2: 2, 3: 2}
    rig.journal()
    finds_none(rig, 2)
    finish = rig.only(act.Finish)
    assert (finish.exit_status, finish.kind) == (2, "device-error")
    assert GONE in finish.reason


def found_wrong(rig: R, *roles: int) -> R:
    rig.steps(3)
    rig.feed(ev.AuditFailed(*rig.seat(0), rig.record.epoch, 4, roles, True, "weights"))
    return rig


@pytest.mark.parametrize("closed", [False, True])
def test_takeover_knows_a_quarantined_node(closed, tmp_path):
    """Whether its order to close has come to the agents or not."""
    old = found_wrong(Rig(nodes=3, spares=1).run(), 1)
    rig, (note,) = old.successor(), old.of(act.Note)
    journal = Journal(tmp_path)
    journal.write("epoch", 1, old.record.to_dict())
    write_note(journal, note.kind, note.number, note.entry)
    rig.machine = Machine(rig.config, rig.now)
    begin(rig.machine, journal, RecoveredState(), pytest.fail)
    rejoin(rig, old, 0, 1, 2, 3, closed=int(closed))
    assert rig.only(act.CloseEpoch).cause == "node 1 was quarantined for the rest of the run"
    rig.lose(3, g(3))
    assert rig.state.phase is Phase.WAITING_SPARE
    rig.join(5)
    assert nodes_of(rig.pending) == {0: 0, 1: 5, 2: 2}


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
def test_quarantined_host_gets_no_role_under_another_number(spares):
    rig = found_wrong(Hosts(3, spares).running(), 1)
    if spares:
        rig.reopened(g(3))
        rig.reap()
        rig.feed(ev.NodeLost(1, "its agent was started anew"))
    else:
        rig.closed(g(3))
    rig.join(7, hosts=["host1"])
    assert rig.dropped() == [act.DropNode(7, EXCLUDED, excluded=True)]
    assert 7 not in rig.state.fleet.nodes
    if not spares:
        rig.join(8, hosts=["host8"])
        assert nodes_of(rig.pending) == {0: 0, 1: 8, 2: 2}


def test_node_of_a_quarantined_host_gives_its_memory_but_gets_no_role():
    rig = found_wrong(Hosts(3, 0).running(), 1)
    rig.closed(g(3))
    rig.join(7, hosts=["host1"], found=Inventory(7, 0, (), ()))
    rig.hello(7)
    assert not rig.dropped()
    assert rig.state.phase is Phase.WAITING_SPARE


def test_host_with_other_nodes_is_not_excluded():
    rig = found_wrong(Hosts(3, 1, {1: "big", 2: "big"}).running(), 1)
    rig.reopened(g(3))
    rig.join(7, hosts=["big"])
    assert not rig.dropped()


def test_divergence_names_the_suspect_checkpoint():
    rig = fallen_back(10, 20)
    rig.opened()
    rig.feed(ev.Diverged("role 0, iteration 21: other loss"))
    assert rig.state.final is not None
    reason = rig.state.final.reason
    assert "this state is suspect, it came from /ck/20 (the one before: /ck/10)" in reason
