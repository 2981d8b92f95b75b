"""What ends waiting in the coordinator's state machine: a complete start, and deadlines."""

from __future__ import annotations

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine import checkup, takeover
from deadpool_megatron.cluster.machine.ending import (
    cannot_decide,
    check_ended,
    dump,
    dump_exported,
    dump_failed,
    finish,
)
from deadpool_megatron.cluster.machine.moves import (
    close,
    decide,
    drop_node,
    kill,
    seating,
)
from deadpool_megatron.cluster.machine.pausing import check_paused
from deadpool_megatron.cluster.machine.roster import MemberStatus, Place
from deadpool_megatron.cluster.machine.state import (
    OPEN_PHASES,
    Failure,
    Phase,
    State,
    Turn,
)
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


def check_gathered(turn: Turn) -> None:
    """Leave GATHERING when all wished nodes are judged and run their members, or after a restart
    have rejoined.

    Spares are no condition, but get ``connect_seconds`` to join, so that the first record has them.
    """
    state = turn.state
    if state.phase is not Phase.GATHERING or state.deadline is None:
        return
    if state.record is not None:
        if state.restarted or len(state.nodes) + len(state.gone) >= len(state.record.nodes):
            takeover.check_all_back(turn)
        return
    if not checkup.has_begun(state) and not _enough_have_come(turn, state.deadline):
        return
    if not checkup.is_judged(turn) or turn.state.phase is not Phase.GATHERING:
        return
    if _seated_is_starting(turn.state):
        return
    seats = seating(turn, turn.state.leaving)
    if not seats.unseated and all(_runs(turn, (s.node, s.slot)) for s in seats.seats.values()):
        decide(turn)


def _enough_have_come(turn: Turn, deadline: float) -> bool:
    # The counts are looked at first: this is asked for every join and every hello.
    state, config = turn.state, turn.config
    began = deadline - config.settings.start_seconds
    patient = turn.now < began + config.settings.connect_seconds or config.check_only
    wanted = config.nodes + (config.spares if patient else 0)
    return len(state.nodes) + len(state.gone) >= wanted and not state.absent(state.seats.nodes)


def _seated_is_starting(state: State) -> bool:
    """Whether a member whose own role waits for it did not say hello yet."""
    places = state.seats.role_by_place
    return any(place in places for place in state.members.starting)


def _runs(turn: Turn, place: Place) -> bool:
    return turn.state.members[place].status in (MemberStatus.RUNNING, MemberStatus.WARM)


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
            _gathered_enough(turn, waited)
        case Phase.CLOSING:
            late = state.awaited | {place[0] for place in state.members.killed}
            for node in sorted(late):
                drop_node(turn, node, _silent(node, "did not close the epoch in time"))
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


def _silent(node: int, what: str) -> Failure:
    signature = ("node", str(node))
    return Failure(f"node {node} {what}", FailureKind.NODE_FROZEN, signature, node=node)


def _open_again(turn: Turn) -> None:
    state = turn.state
    culprits = sorted(set(state.seats) - state.restored)
    for role in culprits:
        kill(turn, (state.seats[role].node, state.seats[role].slot), hung=True)
    cause = f"roles {culprits} did not restore in time"
    signature = ("opening", *map(str, culprits))
    first = state.seats[culprits[0]].node if culprits else None
    close(turn, Failure(cause, FailureKind.HANG, signature, node=first))


def _gathered_enough(turn: Turn, waited: str) -> None:
    """Go on without the late ones if spares can take their place, else end the run."""
    state = turn.state
    if state.record is not None:
        takeover.time_is_over(turn)
        return
    absent = state.absent(state.seats.nodes)
    turn.set(gone=state.gone.update(dict.fromkeys(absent, "did not join in time")))
    if not checkup.is_judged(turn) or turn.state.phase is not Phase.GATHERING:
        return
    state = turn.state
    for node in sorted({place[0] for place in state.members if not _runs(turn, place)}):
        drop_node(turn, node, _silent(node, "did not start its members in time"))
    unseated = seating(turn, frozenset()).unseated
    if unseated:
        who = ", ".join(f"node {n}: {why}" for n, why in sorted(turn.state.gone.items()))
        finish(turn, 2, f"no members for roles {list(unseated)} ({who or waited})")
    else:
        decide(turn)


def _check_members(turn: Turn) -> None:
    """Killed processes must be reaped, and spares must become warm, in their time."""
    settings, members = turn.config.settings, turn.state.members
    for place in sorted(members.killed):
        if turn.now - members[place].since > settings.close_seconds:
            drop_node(turn, place[0], _silent(place[0], "cannot end a killed process"))
    if turn.state.phase not in OPEN_PHASES:
        return
    seated = turn.state.seats.role_by_place
    idle = sorted(place for place in turn.state.members.building if place not in seated)
    for place in idle:
        if turn.now - turn.state.members[place].since > settings.start_seconds:
            kill(turn, place)
