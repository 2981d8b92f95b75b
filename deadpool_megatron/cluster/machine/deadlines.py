"""Ends of waiting in the coordinator's state machine: a complete start, and deadlines."""

from __future__ import annotations

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.epoch import looks
from deadpool_megatron.cluster.machine.epoch.closing import (
    check_closed,
    close,
    drop_node,
    silent,
)
from deadpool_megatron.cluster.machine.epoch.ending import (
    cannot_decide,
    check_ended,
    dump,
    dump_overdue,
)
from deadpool_megatron.cluster.machine.epoch.pausing import check_paused
from deadpool_megatron.cluster.machine.gathering import takeover
from deadpool_megatron.cluster.machine.gathering.start import check_gathered, gathered_enough
from deadpool_megatron.cluster.machine.state import phases
from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.turn import Turn


def tick(turn: Turn) -> None:
    """Look at every deadline."""
    _believe(turn)
    deadline = turn.state.deadline
    if deadline is not None and turn.now >= deadline:
        if waited := turn.state.waiting_for():
            turn.log("warning", f"waited long enough for {waited}")
        _overdue(turn, waited)
    elif turn.state.phase is phases.Phase.GATHERING:
        check_gathered(turn)
    _check_members(turn)


def _believe(turn: Turn) -> None:
    """Act on a suspicion when no better cause came in its time."""
    suspicion, record = turn.state.blame.suspicion, turn.state.record
    if suspicion is not None and turn.now >= suspicion.until and record is not None:
        blame = turn.state.blame.believing(suspicion, record.restore)
        turn.state = turn.state._replace(blame=blame)
        if suspicion.doubtful and record.restore.path:
            looks.strike(turn, record.restore.path, suspicion.failure.cause)
        close(turn, suspicion.failure)


def _overdue(turn: Turn, waited: str) -> None:
    match turn.state.doing:
        case phases.Gathering():
            gathered_enough(turn, waited)
        case phases.Rejoining() as rejoining if turn.state.record is not None:
            takeover.time_is_over(turn, rejoining, turn.state.record)
        case phases.Closing(looks=True):
            looks.seen(turn, frozenset())  # what cannot be looked at may be there
            check_closed(turn)
        case phases.Closing(awaited=awaited):
            late = awaited | {place[0] for place in turn.state.fleet.members.killed}
            for node in sorted(late):
                drop_node(turn, node, silent(node, "did not close the epoch in time"))
        case phases.WaitingSpare():
            dump(turn)
        case phases.Deciding():
            cannot_decide(turn, f"waited too long for {waited}")
        case phases.Opening(restored=restored):
            _open_again(turn, sorted(set(turn.state.seats) - restored))
        case phases.Pausing():
            check_paused(turn, overdue=True)
        case phases.Dumping() as dumping:
            dump_overdue(turn, dumping)
        case phases.Ending():
            check_ended(turn, overdue=True)


def _open_again(turn: Turn, culprits: list[int]) -> None:
    seats = turn.state.seats
    for role in culprits:
        turn.kill((seats[role].node, seats[role].slot), hung=True)
    cause = f"roles {culprits} did not restore in time"
    signature = ("opening", *map(str, culprits))
    first = seats[culprits[0]].node if culprits else None
    close(turn, Failure(cause, FailureKind.HANG, signature, node=first))


def _check_members(turn: Turn) -> None:
    """Killed processes must be reaped, and spares must become warm, in their time."""
    settings, members = turn.config.settings, turn.state.fleet.members
    if turn.state.phase in phases.LAST_PHASES:
        return  # no process is needed any more, what its node holds is
    for place in sorted(members.killed):
        if turn.now - members[place].since > settings.close_seconds:
            drop_node(turn, place[0], silent(place[0], "cannot end a killed process"))
    doing, record = turn.state.doing, turn.state.record
    if not isinstance(doing, phases.Open) or record is None:
        return
    if isinstance(doing, phases.Opening) and record.restore.kind == "initial":
        return  # spares wait until the data is ready
    seated, members = turn.state.seats.role_by_place, turn.state.fleet.members
    for place in sorted(place for place in members.building if place not in seated):
        if turn.now - members[place].since > settings.start_seconds:
            turn.kill(place)
