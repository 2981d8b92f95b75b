"""Who plays which role in the next epoch, and what it is restored from. Pure functions on a Turn.

Each sets the phase together with its deadline, so no wait can be without one.
"""

from __future__ import annotations

from collections.abc import Mapping

from deadpool_megatron.cluster.machine import protection
from deadpool_megatron.cluster.machine.actions import WriteRecord
from deadpool_megatron.cluster.machine.epoch.ending import dump, dump_held
from deadpool_megatron.cluster.machine.state import history
from deadpool_megatron.cluster.machine.state.phases import LastWords, Phase
from deadpool_megatron.cluster.machine.state.roster import MemberStatus
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn, restore_query
from deadpool_megatron.events import Kind
from deadpool_megatron.layout import schemes
from deadpool_megatron.layout.decision import NoRestore, Seating, SeatingQuery
from deadpool_megatron.layout.placement import missing_copies
from deadpool_megatron.layout.records import EpochRecord, NodeAddress, Seat
from deadpool_megatron.layout.schemes import losses_survived


def seating(turn: Turn, leaving: frozenset[int]) -> Seating:
    """Who would play which role now."""
    state = turn.state
    return turn.planner.assign_seats(
        SeatingQuery(
            seats=state.seats,
            members={place: member.incarnation for place, member in state.members.items()},
            warm=frozenset(p for p, m in state.members.items() if m.status is MemberStatus.WARM),
            leaving=leaving,
            avoid=state.avoid,
        )
    )


def decide(turn: Turn) -> None:
    """Choose seats and restore from what is known now; immediate, unless a kill is under way."""
    if turn.state.members.killed:
        _wait_for_reaping(turn)
        return
    if turn.state.last_words is not None:
        dump(turn)
        return
    seats = seating(turn, turn.state.leaving)
    if seats.unseated and turn.state.leaving:  # the spare for the drain has gone in the meantime
        turn.set(leaving=frozenset())
        seats = seating(turn, turn.state.leaving)
    state = turn.state
    restore = turn.planner.choose_restore(restore_query(turn, seats.seats))
    if isinstance(restore, NoRestore):
        if state.returning:
            _wait_for_return(turn, restore.reason)
        else:
            dump_held(turn, LastWords(1, _with_scheme(turn, restore.reason)))
        return
    if seats.unseated:
        _wait_for_spare(turn, seats)
        return
    nodes = record_nodes(state, seats.seats)
    if why := protection.settle(turn, seats.seats, nodes, restore):
        protection.wait_or_end(turn, why, restore)
        return
    record = EpochRecord(
        epoch=state.epoch + 1,
        seats=seats.seats,
        nodes=nodes,
        restore=restore,
        replicas=losses_survived(turn.config.settings, turn.state.protection),
        protection=turn.state.protection,
        emitted_up_to=state.newest,
        fewer_copies=owed_copies(seats.seats, nodes, turn),
        cause="; then ".join(state.recovery.causes) if state.recovery else "start",
        history=history.of_next_epoch(state, restore),
    )
    turn.set(
        phase=Phase.DECIDING,
        # A journal that cannot be written for a while is tried again until then.
        deadline=turn.now + 2 * turn.config.settings.spare_timeout_seconds,
        epoch=record.epoch,
        pending=record,
        redecide=None,
    )
    turn.act(WriteRecord(record))


def record_nodes(state: State, seats: Mapping[int, Seat]) -> dict[int, NodeAddress]:
    """All live nodes as a record names them; who has no seat is a spare."""
    training = {seat.node for seat in seats.values()}
    return {
        node: NodeAddress(known.host, known.vault_port, known.domain, spare=node not in training)
        for node, known in sorted(state.nodes.items())
    }


def owed_copies(
    seats: Mapping[int, Seat], nodes: Mapping[int, NodeAddress], turn: Turn
) -> frozenset[int]:
    """Roles that have fewer copies than wanted if these nodes play them."""
    return missing_copies(
        {role: seat.node for role, seat in seats.items()},
        {node: address.domain for node, address in nodes.items()},
        {node for node, address in nodes.items() if address.spare},
        losses_survived(turn.config.settings, turn.state.protection),
    )


def _with_scheme(turn: Turn, reason: str) -> str:
    """Why nothing can be restored, and the choice that has led to it."""
    if turn.state.gone and schemes.Kind.LOCAL in turn.state.protection.kinds:
        return (
            "--deadpool-protection local keeps the state of a node on that node only, and one was"
            f" lost: {reason}; save checkpoints more often, or protect with buddy or parity"
        )
    return reason


def _wait_for_reaping(turn: Turn) -> None:
    """Whether a slot gets a new process in place is known only when the old one has ended."""
    if turn.state.phase is not Phase.WAITING_SPARE:
        limit = turn.config.settings.gather_seconds
        turn.set(phase=Phase.CLOSING, deadline=turn.now + limit, pending=None, redecide=None)


def _wait_for_spare(turn: Turn, seats: Seating) -> None:
    if turn.state.phase is Phase.WAITING_SPARE:
        return
    turn.set(
        phase=Phase.WAITING_SPARE,
        deadline=turn.now + turn.config.settings.spare_timeout_seconds,
        pending=None,
        redecide=None,
    )
    roles = list(seats.unseated)
    turn.emit(Kind.LOG, level="warning", text=f"roles {roles} wait for a spare node to join")


def _wait_for_return(turn: Turn, reason: str) -> None:
    """What is missing may lie in memory of a host whose agent ended: it can be started again."""
    if turn.state.phase is Phase.WAITING_SPARE:
        return
    limit = turn.config.settings.spare_timeout_seconds
    turn.set(phase=Phase.WAITING_SPARE, deadline=turn.now + limit, pending=None, redecide=None)
    nodes = sorted(turn.state.returning)
    text = f"{reason}: nodes {nodes} have {limit:g} s to come back with what they hold in memory"
    turn.emit(Kind.LOG, level="warning", text=text)
