"""What ends waiting in the coordinator's state machine: a complete start, and deadlines."""

from __future__ import annotations

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.epoch.closing import close, drop_node, silent
from deadpool_megatron.cluster.machine.epoch.ending import (
    cannot_decide,
    check_ended,
    dump,
    dump_exported,
    dump_failed,
)
from deadpool_megatron.cluster.machine.epoch.pausing import check_paused
from deadpool_megatron.cluster.machine.gathering.start import check_gathered, gathered_enough
from deadpool_megatron.cluster.machine.state.blame import Failure
from deadpool_megatron.cluster.machine.state.phases import OPEN_PHASES, Phase
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind


def tick(turn: Turn) -> None:
    """Look at every deadline."""
    suspicion = turn.state.suspicion
    if suspicion is not None and turn.now >= suspicion.until:
        _believe(turn)
    state = turn.state
    if state.deadline is not None and turn.now >= state.deadline:
        if state.waiting_for():
            text = f"waited long enough for {state.waiting_for()}"
            turn.emit(Kind.LOG, level="warning", text=text)
        _overdue(turn)
    elif state.phase is Phase.GATHERING:
        check_gathered(turn)
    _check_members(turn)


def _believe(turn: Turn) -> None:
    """No better cause came: act on the suspicion."""
    state = turn.state
    suspicion, record = state.suspicion, state.record
    assert suspicion is not None
    assert record is not None
    turn.set(bad_parts=state.bad_parts | suspicion.bad_parts)
    if suspicion.doubtful:
        # The first time the fault may be a device's; the second time the generation is given up.
        generation = record.restore.generation
        if generation in state.doubted:
            turn.set(bad_generations=state.bad_generations | {generation})
        turn.set(doubted=state.doubted | {generation})
    close(turn, suspicion.failure)


def _overdue(turn: Turn) -> None:
    state = turn.state
    waited = state.waiting_for()
    match state.phase:
        case Phase.GATHERING:
            gathered_enough(turn, waited)
        case Phase.CLOSING:
            late = state.awaited | {place[0] for place in state.members.killed}
            for node in sorted(late):
                drop_node(turn, node, silent(node, "did not close the epoch in time"))
        case Phase.WAITING_SPARE:
            dump(turn)
        case Phase.DECIDING:
            cannot_decide(turn, f"waited too long for {waited}")
        case Phase.OPENING:
            _open_again(turn)
        case Phase.PAUSING:
            check_paused(turn, overdue=True)
        case Phase.DUMPING if state.dump is not None and state.dump.exporting:
            dump_exported(turn, state.dump.restore.generation, "")
        case Phase.DUMPING:
            for node in sorted(state.dump.awaited if state.dump else ()):
                dump_failed(turn, node, "not done in time")
        case Phase.ENDING:
            check_ended(turn, overdue=True)


def _open_again(turn: Turn) -> None:
    state = turn.state
    culprits = sorted(set(state.seats) - state.restored)
    for role in culprits:
        turn.kill((state.seats[role].node, state.seats[role].slot), hung=True)
    cause = f"roles {culprits} did not restore in time"
    signature = ("opening", *map(str, culprits))
    first = state.seats[culprits[0]].node if culprits else None
    close(turn, Failure(cause, FailureKind.HANG, signature, node=first))


def _check_members(turn: Turn) -> None:
    """Killed processes must be reaped, and spares must become warm, in their time."""
    settings, members = turn.config.settings, turn.state.members
    for place in sorted(members.killed):
        if turn.now - members[place].since > settings.close_seconds:
            drop_node(turn, place[0], silent(place[0], "cannot end a killed process"))
    if turn.state.phase not in OPEN_PHASES:
        return
    seated = turn.state.seats.role_by_place
    idle = sorted(place for place in turn.state.members.building if place not in seated)
    for place in idle:
        if turn.now - turn.state.members[place].since > settings.start_seconds:
            turn.kill(place)
