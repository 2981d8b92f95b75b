"""A coordinator has taken over a run: what it finds continues, unless something happened to it.

The journal says what was decided last, the agents say what became of it. While they come back the
machine is GATHERING, members continue working, and what goes wrong is only remembered (``missed``).
When all are back the newest epoch stays open, or it is closed as after any failure. Pure functions
on a Turn.
"""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.journal.requests import Stage
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.epoch.closing import close, give_up, matters
from deadpool_megatron.cluster.machine.epoch.opening import check_opened, opening_seconds
from deadpool_megatron.cluster.machine.gathering import checkup
from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.state.fleet import MemberStatus
from deadpool_megatron.cluster.machine.state.phases import Opening, Rejoining
from deadpool_megatron.cluster.machine.state.state import Config
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.layout.records import EpochRecord

STARTED_AGAIN = "all processes of the run were started again"


def left_behind(turn: Turn, event: ev.NodeJoined) -> str:
    """Return why an agent that comes back has no part in the run any more; empty when it has."""
    record = turn.state.record
    if record is None or event.node in record.nodes or not event.epoch:
        return ""
    return f"epoch {record.epoch} went on without this node"


def note_join(turn: Turn, event: ev.NodeJoined) -> None:
    """Take what a connected agent says about the newest epoch, while all come back."""
    state, record = turn.state, turn.state.record
    if not isinstance(state.doing, Rejoining) or record is None:
        return
    restored = state.doing.restored
    for slot, epoch in event.restored.items():
        role = state.role_at(event.node, slot, event.members.get(slot, -1))
        if epoch == record.epoch and role is not None:
            restored = restored.with_item(role)
    # Members without an epoch: theirs have died with the agent before it.
    came_anew = event.node in record.nodes and not event.epoch and not event.members
    # A spare that came after the newest record has members, and no epoch.
    is_old = bool(event.epoch or event.members)
    doing, restarted = replace(state.doing, restored=restored), state.restarted or came_anew
    survived = state.survived or is_old
    if survived:
        doing = replace(doing, requests=frozenset())
    turn.state = state._replace(doing=doing, restarted=restarted, survived=survived)
    if event.closed >= record.epoch:
        cause = f"epoch {record.epoch} was closed before the coordinator changed"
        close(turn, Failure(cause, FailureKind.COORDINATOR))


def check_all_back(turn: Turn, rejoining: Rejoining, record: EpochRecord) -> None:
    """Go on when every node of the newest record is back or lost.

    After a restart there is nothing to lose by waiting: lost nodes may come under other numbers,
    with their slots, so that as many nodes are awaited as at the start of a run. Where an agent of
    before has come back, others may still train, and nobody is lost before ``rejoin_seconds``.
    """
    state, config = turn.state, turn.config
    began = rejoining.deadline - patience_seconds(config)
    is_late = turn.now >= began + config.settings.rejoin_seconds
    if state.restarted and (is_late or not state.survived):
        patient = turn.now < began + config.settings.connect_seconds
        if len(state.fleet.nodes) >= config.nodes + (config.spares if patient else 0):
            time_is_over(turn, rejoining, record)
            return
    if (
        (state.survived or not state.restarted)
        # The counts are looked at first: this is asked for every join and every hello.
        and len(state.fleet.nodes) + len(state.fleet.gone) >= len(record.nodes)
        and not state.fleet.absent(record.nodes)
        and (rejoining.missed is not None or not _is_unclear(turn, record))
    ):
        _go_on(turn, rejoining, record)


def _is_unclear(turn: Turn, record: EpochRecord) -> bool:
    """Return whether nothing has happened but that nodes without a role are lost, and only layouts
    that roles have still to tell can say whether they owed copies."""
    state = turn.state
    if len(state.memory.layouts) >= len(record.seats):
        return False
    lost = {node for node in state.fleet.gone if node in record.nodes}
    return (
        bool(lost)
        and lost.isdisjoint(state.seats.nodes)
        and all(_plays(turn, role) for role in record.seats)
    )


def patience_seconds(config: Config) -> float:
    """Return how long agents may take to come to a coordinator that has taken over."""
    settings = config.settings
    return settings.start_seconds if config.restarted else settings.rejoin_seconds


def time_is_over(turn: Turn, rejoining: Rejoining, record: EpochRecord) -> None:
    """Take those who have not come back by now for lost."""
    for node in turn.state.fleet.absent(record.nodes):
        give_up(turn, node, "did not join again in time", FailureKind.NODE_LOST)
    _go_on(turn, rejoining, record)


def _go_on(turn: Turn, rejoining: Rejoining, record: EpochRecord) -> None:
    """The newest epoch stays open; no member notices that the coordinator is another one."""
    checkup.agree_again(turn)
    fleet = turn.state.fleet
    if any(known.returns for known in fleet.nodes.values()):  # so it is with those that are gone
        back = fleet.returning | (fleet.gone.keys() & record.nodes.keys())
        turn.state = turn.state._replace(fleet=replace(fleet, returning=back))
    for request in turn.state.requests:
        if request.number in rejoining.requests and request.is_open:
            turn.change(request.at(Stage.REFUSED, STARTED_AGAIN))
    failure = rejoining.missed or _happened(turn, record)
    deadline = turn.now + opening_seconds(turn, record)
    restored, done = rejoining.restored, rejoining.done
    turn.enter(Opening(deadline, restored, done, rejoining.begins, rejoining.pause))
    if failure is not None:
        close(turn, failure)
        return
    turn.log("info", f"all agents are back, epoch {record.epoch} stays open")
    check_opened(turn)


def _happened(turn: Turn, record: EpochRecord) -> Failure | None:
    """Return what nobody has reported, for there was no coordinator to report it to."""
    state = turn.state
    ended = [role for role in sorted(record.seats) if not _plays(turn, role)]
    if ended and state.restarted:
        some = f"processes of roles {ended} were started again"
        return Failure(
            "all processes were started again" if len(ended) == len(record.seats) else some,
            FailureKind.RESTART,
        )
    if wrong := sorted(state.fleet.leaving & set(state.fleet.nodes)):
        node = wrong[0]
        cause = f"node {node} was put aside for the rest of the run"
        return Failure(cause, FailureKind.LEFT_OUT, ("node", str(node)), node=node)
    for node in sorted(set(record.nodes) - set(state.fleet.nodes)):
        if matters(state, record, node):
            cause = f"node {node}: {state.fleet.gone.get(node, 'gone')}"
            return Failure(cause, FailureKind.NODE_LOST, ("node", str(node)), node=node)
    if ended:
        cause = f"members of roles {ended} ended while there was no coordinator"
        signature = ("unseen", *map(str, ended))
        return Failure(
            cause, FailureKind.PROCESS_CRASH, signature, node=record.seats[ended[0]].node
        )
    return None


def _plays(turn: Turn, role: int) -> bool:
    """Return whether the very process that has the role's seat is alive."""
    seat = turn.state.seats[role]
    member = turn.state.fleet.members.get((seat.node, seat.slot))
    return (
        member is not None
        and member.incarnation == seat.incarnation
        and member.status is not MemberStatus.KILLED
    )
