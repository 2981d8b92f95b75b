"""Messages that come too late: of closed epochs, ended processes and lost nodes."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.cluster.watch.hang import table_of
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import (
    Generation,
    Inventory,
)
from tests.cluster.machine.world import World


def stale_inputs(world: World) -> Iterable[ev.Input]:
    """Messages of closed epochs, ended processes and lost nodes."""
    past = [r for r in world.announced if r.epoch != world.state.heard_epoch]
    for record in past[-2:]:
        for seat in list(record.seats.values())[:2]:
            who = (seat.node, seat.slot, seat.incarnation)
            g = record.restore.generation
            yield ev.Restored(*who, record.epoch, g)
            yield ev.NotRestored(*who, record.epoch, "main", "late")
            yield ev.MemberFault(*who, record.epoch, "late")
            yield ev.MemberRaised(*who, record.epoch, "late")
            yield ev.AuditFailed(*who, record.epoch, 1, (0,), True, "late")
            yield ev.Paused(*who, record.epoch, g.iteration)
            yield ev.PauseRefused(*who, record.epoch, g.iteration + 5)
            yield ev.MemberDone(*who, record.epoch)
        yield ev.StepReported(record.epoch, 10_000)
        yield ev.RolesHung(record.epoch, (0,), "late", table_of({}))
        if world.state.record is not None and record.epoch < world.state.record.epoch:
            for node in record.nodes:
                yield ev.NodeInventory(Inventory(node, record.epoch))
    for node, slot in list(world.state.fleet.members):
        gone = world.state.fleet.members[node, slot].incarnation - 1
        yield ev.MemberLost(node, slot, gone, signal=9)
        yield ev.MemberHello(node, slot, gone)
        yield ev.MemberWarm(node, slot, gone)
        yield ev.MemberSuspected(node, slot, gone, "late")
    for node in world.state.fleet.removed:
        yield ev.NodeLost(node, "late")
        yield ev.NodeJoined(node, "host", 1, "anywhere")
        yield ev.Dumped(node, Generation(1, 0))
    if world.state.phase is not Phase.DECIDING:
        yield ev.JournalWritten(world.state.epoch)
        yield ev.JournalFailed(world.state.epoch, "late")
    if world.exporting is None:
        yield ev.DumpExported(Generation(1, 0), "/late")


def feed_stale(world: World) -> None:
    """Rule 5: none of them changes anything; at most they are refused."""
    known = (world.state.record, world.state.seats)  # records never change
    before = deepcopy(world.state, {id(one): one for one in known})
    for event in list(stale_inputs(world)):
        actions = world.machine.handle(event, world.now)
        assert world.state == before, event
        for action in actions:
            refused = isinstance(action, act.EmitEvent) and action.kind is Kind.REFUSED
            assert refused or isinstance(action, act.DropNode), action
