"""Messages that come at the wrong time: of closed epochs and ended processes, of lost nodes, of
epochs that have not begun; and those of this epoch, a second time."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.cluster.watch.hang import table_of
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import EpochRecord, Generation, Inventory
from tests.simulated.world import World

Place = tuple[int, int, int, int]  # node, slot, incarnation, epoch
# Each kind of input with an epoch, of a member with a role in that epoch, which began with this
# generation.
OF_EPOCH: Mapping[type[ev.Input], Callable[[Place, Generation], ev.Input]] = {
    ev.AuditFailed: lambda p, _: ev.AuditFailed(*p, 1, (0,), True, "late"),
    ev.MemberDone: lambda p, _: ev.MemberDone(*p),
    ev.MemberFault: lambda p, _: ev.MemberFault(*p, "late"),
    ev.MemberRaised: lambda p, _: ev.MemberRaised(*p, "late"),
    ev.NodeInventory: lambda p, _: ev.NodeInventory(Inventory(p[0], p[3])),
    ev.NotRestored: lambda p, _: ev.NotRestored(*p, "main", "late"),
    ev.Paused: lambda p, g: ev.Paused(*p, g.iteration),
    ev.PauseRefused: lambda p, g: ev.PauseRefused(*p, g.iteration + 5),
    ev.PhaseReported: lambda p, _: ev.PhaseReported(p[3], "restore", 1e6),
    ev.Restored: lambda p, g: ev.Restored(*p, g),
    ev.RolesHung: lambda p, _: ev.RolesHung(p[3], (0,), "late", table_of({})),
    ev.SizeFailed: lambda p, _: ev.SizeFailed(*p, "late"),
    ev.StepReported: lambda p, _: ev.StepReported(p[3], 10_000),
}
# A number that is not finite counts as long as its generation may be restored: see NotFinite. The
# journal answers for the newest number only, below; an agent that joins reports its own.
NOT_OF_EPOCH = {ev.NotFinite, ev.JournalWritten, ev.JournalFailed, ev.NodeJoined}


def of_epoch(world: World, epoch: int, record: EpochRecord) -> Iterable[ev.Input]:
    """All kinds of messages of the epoch, from processes with a seat in the record."""
    for seat in list(record.seats.values())[:2]:
        for kind, make in OF_EPOCH.items():
            # An inventory counts until the next record is announced, as its epoch does.
            newest = world.state.record
            if kind is not ev.NodeInventory or newest is None or epoch != newest.epoch:
                yield make((*seat.to_list(), epoch), record.restore.generation)


def early_inputs(world: World) -> Iterable[ev.Input]:
    """Messages of epochs that have not begun."""
    if (record := world.state.record) is not None:
        for ahead in (1, 7):
            yield from of_epoch(world, world.state.epoch + ahead, record)


def stale_inputs(world: World) -> Iterable[ev.Input]:
    """Messages of closed epochs, ended processes and lost nodes."""
    past = [r for r in world.announced if r.epoch != world.state.reporting_epoch]
    for record in past[-2:]:
        yield from of_epoch(world, record.epoch, record)
    for node, slot in list(world.state.fleet.members):
        gone = world.state.fleet.members[node, slot].incarnation - 1
        yield ev.MemberLost(node, slot, gone, signal=9)
        yield ev.MemberHello(node, slot, gone)
        yield ev.MemberWarm(node, slot, gone)
        yield ev.MemberSuspected(node, slot, gone, "late")
    for node in {*world.state.fleet.nodes, *world.state.fleet.removed, 10_000}:
        yield ev.AgentEnded(node)
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
    before = deepcopy(world.state, {id(each): each for each in known})
    for event in [*stale_inputs(world), *early_inputs(world)]:
        actions = world.machine.handle(event, world.clock.now)
        assert world.state == before, event
        for action in actions:
            refused = isinstance(action, act.EmitEvent) and action.kind is Kind.REFUSED
            assert refused or isinstance(action, act.DropNode), action
