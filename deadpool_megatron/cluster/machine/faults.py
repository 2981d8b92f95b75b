"""Reports of roles of what is wrong, faults that repeat on one node, and numbers that are not
finite."""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.failures import (
    EXIT_DIVERGENCE,
    OF_THE_HOST,
    FailureKind,
)
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.actions import EmitEvent, NoteWrong
from deadpool_megatron.cluster.machine.epoch.closing import close, drop_node, save_and_end
from deadpool_megatron.cluster.machine.epoch.deciding import seating
from deadpool_megatron.cluster.machine.state.blame import Failure, LastWords
from deadpool_megatron.cluster.machine.state.fleet import NodeState, Place
from deadpool_megatron.cluster.machine.state.phases import LAST_PHASES
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import BadPart, Generation
from deadpool_megatron.layout.replaying import REPLAY, suspects
from deadpool_megatron.layout.schemes import recomputes, without_recompute

# A device that failed once may have been hit by a stray particle, and memory may have been short
# for a moment; what fails again is broken.
_HOST_ERRORS = 2


def fault_reported(turn: Turn, event: ev.MemberFault) -> None:
    """Communication has failed in a role."""
    if (role := turn.player(event)) is not None:
        text, kind = f"role {role}: {event.text}", FailureKind.COMMUNICATOR_ERROR
        turn.suspect(Failure(text, kind, ("fault",), node=event.node))


def restore_failed(turn: Turn, event: ev.RestoreFailed) -> None:
    """No place had good bytes of a part: the next restore does without those that were tried."""
    role, record = turn.player(event), turn.state.record
    if role is None or record is None:
        return
    restore, generation = record.restore, record.restore.generation
    tried = [*restore.sources.get(role, {}).get(event.part, ())]
    recipe = restore.recipes.get(role)
    decoding = recipe.decodings.get(event.part) if recipe is not None else None
    if decoding is not None:
        # Its parity blocks: no decoding goes without one. What other roles hold of their own is
        # not in doubt for that; where it is damaged, the node that holds it has found out.
        for number, places in decoding.blocks.items():
            if number >= len(decoding.group):
                tried += places
    bad = frozenset(BadPart(one.node, one.role, generation, event.part) for one in tried)
    if recipe is not None:
        bad |= frozenset(suspects(recipe, generation, event.part))
        if event.part == REPLAY:
            _give_up_recomputing(turn, role, event.text)
    # Falling to the next source, generation or checkpoint is progress of a kind. What fails as a
    # whole does so whoever is the first to say it.
    whole = str(generation) if restore.kind == "memory" else restore.path or restore.kind
    what = (event.part, str(role), str(generation)) if bad else (whole,)
    cause = f"role {role} cannot be restored: {event.text}"
    failure = Failure(cause, FailureKind.CORRUPT_STATE, ("restore", *what), node=event.node)
    turn.suspect(failure, bad, doubtful=not bad)


def _give_up_recomputing(turn: Turn, role: int, text: str) -> None:
    """Intact bytes gave another result: whole copies for the rest of the run."""
    chosen = turn.state.protection
    if recomputes(chosen.plan):
        chosen = replace(chosen, plan=without_recompute(chosen.plan))
        turn.state = turn.state._replace(protection=chosen)
        why = "from the next epoch on every iteration is copied whole"
        turn.log("warning", f"role {role}: {text}; {why}")


def with_restart(turn: Turn, node: NodeState) -> NodeState:
    """The node with one more restart, and without those that are too long ago to count."""
    times = (*_recent(turn, node.restarted_at), turn.now)
    return replace(node, restarts=node.restarts + 1, restarted_at=times)


def crashed(turn: Turn, node: int, failure: Failure) -> None:
    """A process of the node ended an epoch by crashing: put the node aside when that repeats, but
    only if a spare can take all its roles; else it stays in place. The node is not dropped: what
    its vault holds may be what the others restore from.
    """
    if turn.state.phase in LAST_PHASES or node not in turn.state.fleet.nodes:
        return
    known = turn.state.fleet.nodes[node]
    of_host = failure.kind in OF_THE_HOST
    times = (*_recent(turn, known.crashed_at), turn.now)
    known = replace(known, crashed_at=times, host_errors=known.host_errors + of_host)
    turn.state = turn.state._replace(fleet=turn.state.fleet.with_node(node, known))
    settings = turn.config.settings
    if of_host and known.host_errors >= _HOST_ERRORS:
        why = f"{known.host_errors} errors of its device or memory"
    elif len(known.crashed_at) >= settings.node_crashes:
        count, window = len(known.crashed_at), settings.node_crash_window_seconds
        why = f"{count} crashes within {window:g} s"
    else:
        return
    _put_aside(turn, node, f"after {why}, the last: {failure.cause}", failure.kind)


def _put_aside(turn: Turn, node: int, why: str, kind: FailureKind) -> bool:
    """Have the roles of the node go to a spare; False if none can take all of them."""
    if not has_better(turn, node):
        return False
    fleet, cause = turn.state.fleet, f"node {node} is put aside {why}"
    fleet = replace(fleet, leaving=fleet.leaving | {node})
    turn.state = turn.state._replace(fleet=fleet)
    turn.emit(Kind.NODE_ASIDE, node=node, cause=cause, kind=kind)
    return True


def device_lost(turn: Turn, place: Place, failure: Failure) -> None:
    """The device of a process is of no use any more: nothing follows the process there, and the
    roles of its node move. Without a spare they wait for one: there they would fail again."""
    node, fleet = place[0], turn.state.fleet
    turn.state = turn.state._replace(
        fleet=replace(fleet, members=fleet.members.without_member(place))
    )
    fleet = turn.state.fleet
    if node in fleet.wrong:
        return
    cause = f"node {node} is put aside for the rest of the run: {failure.cause}"
    turn.state = turn.state._replace(fleet=replace(fleet, leaving=fleet.leaving | {node}))
    _note_wrong(turn, node, cause)
    turn.emit(Kind.NODE_ASIDE, node=node, cause=cause, kind=failure.kind)


def has_better(turn: Turn, node: int) -> bool:
    """Return whether all roles of the node can go to a spare that was not put aside itself."""
    state = turn.state
    before = {seat.node for seat in state.seats.values()}
    found = seating(turn, state.fleet.leaving | {node})
    after = {seat.node for seat in found.seats.values()}
    is_better = not found.unseated and not (after - before) & state.fleet.avoid
    return is_better and node not in state.fleet.leaving


def _recent(turn: Turn, times: tuple[float, ...]) -> tuple[float, ...]:
    since = turn.now - turn.config.settings.node_crash_window_seconds
    return tuple(time for time in times if time >= since)


def _note_wrong(turn: Turn, node: int, cause: str) -> None:
    """The node has no role any more, under whatever number it comes back: its host is remembered,
    unless other nodes continue there, which are as good as any."""
    fleet = turn.state.fleet
    if (known := fleet.nodes.get(node)) is None:
        return
    is_shared = any(
        one.host_name == known.host_name and other not in fleet.wrong
        for other, one in fleet.nodes.items()
        if other != node
    )
    host = "" if is_shared else known.host_name
    turn.state = turn.state._replace(fleet=fleet.found_wrong(node, host))
    turn.act(NoteWrong(node, host, cause))


def audit_failed(turn: Turn, event: ev.AuditFailed) -> None:
    """Put the nodes aside that are wrong; without a spare for them they are given up, and their
    roles wait for one. Where peers differ and nobody can tell who is wrong, the run ends:
    continuing with either would be training on what may be wrong."""
    role, state = turn.player(event), turn.state
    if role is None or not all(one in state.seats for one in event.roles):
        return
    nodes = sorted({state.seats[one].node for one in event.roles})
    named = " and ".join(f"node {node}" for node in nodes)
    facts = {"roles": list(event.roles), "certain": event.certain, "what": event.what}
    place = event.epoch, event.node, role, event.iteration
    turn.act(EmitEvent(Kind.AUDIT_FAILED, *place, facts))
    cause = f"{event.what} in iteration {event.iteration}: {named}"
    if not event.certain and len(nodes) > 1:
        text = f"{cause} differ, and who is wrong cannot be told: go on without one, then the other"
        words = LastWords(EXIT_DIVERGENCE, text, FailureKind.SILENT_CORRUPTION)
        save_and_end(turn, words, FailureKind.SILENT_CORRUPTION)
        return
    kind, signature = FailureKind.SILENT_CORRUPTION, ("audit", *map(str, event.roles))
    failure = Failure(f"{cause} computed or held wrong numbers", kind, signature, node=nodes[0])
    left = []
    for node in nodes:
        if not _put_aside(turn, node, f"as {failure.cause}", kind):
            left.append(node)
        _note_wrong(turn, node, failure.cause)
    for node in left:
        drop_node(turn, node, replace(failure, node=node))
    close(turn, failure)


EXIT_NONFINITE = 4


def not_finite(turn: Turn, event: ev.NotFinite) -> None:
    """Act on it as the setting ``nonfinite`` says, which is stop or rollback.

    The epoch may have been closed meanwhile for another reason: its generations count all the same.
    """
    state, computed = turn.state, Generation(event.epoch, event.iteration)
    k, blame = event.iteration, state.blame
    if blame.is_poisoned(computed):
        return  # told by another role already, or it follows from what was told
    # Nothing computes iteration 0: it is what was built or loaded.
    if k < 1 or state.phase in LAST_PHASES or not state.line.keeps(computed):
        why = f"nothing goes on from it in epoch {event.epoch}"
        turn.refuse(f"{event.number} of step {k}", why)
        return
    again, may_roll_back = k in blame.nonfinite, turn.config.settings.nonfinite == "rollback"
    # A second time it was no stray fault of this iteration: the state before it may be no good.
    bad = _origin(state) if again else k
    policy = "stop" if bad is None or not may_roll_back else "rollback"
    facts = {"number": event.number, "value": event.value, "policy": policy}
    turn.act(EmitEvent(Kind.NONFINITE, event.epoch, event.node, event.role, k, facts))
    found = f"the {event.number} of iteration {k} is {event.value}"
    cause = f"{found} (role {event.role}, node {event.node})"
    if again:
        cause += ", and was not finite either when it was computed before"
    if bad is None or not may_roll_back:
        # What is saved is the state before the iteration.
        turn.state = state._replace(blame=replace(blame, poisoned_from=k))
        save_and_end(turn, LastWords(EXIT_NONFINITE, cause, FailureKind.NONFINITE_LOSS))
        return
    blame = blame.throwing_away(k, state.epoch).throwing_away(bad, state.epoch)
    turn.state = state._replace(blame=blame)
    signature = ("nonfinite", str(k), str(bad))
    close(turn, Failure(cause, FailureKind.NONFINITE_LOSS, signature, node=event.node))


def _origin(state: State) -> int | None:
    """The iteration of the generation that this epoch continues from, None where there is no older
    state to fall to; a checkpoint was looked at when it was written."""
    record = state.record
    if record is None or record.restore.kind not in ("memory", "dump"):
        return None
    k = record.restore.generation.iteration
    return k if any(one.generation.iteration < k for one in state.line.valid) else None
