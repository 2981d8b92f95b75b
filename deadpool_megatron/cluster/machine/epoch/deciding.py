"""The decision on the next epoch: its seats, and the state that it is restored from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deadpool_megatron.cluster.machine import protection
from deadpool_megatron.cluster.machine.actions import WriteRecord
from deadpool_megatron.cluster.machine.epoch.ending import dump, dump_held, finish
from deadpool_megatron.cluster.machine.epoch.looks import must_look, with_struck
from deadpool_megatron.cluster.machine.state.blame import LastWords
from deadpool_megatron.cluster.machine.state.fleet import MemberStatus
from deadpool_megatron.cluster.machine.state.phases import Closing, Deciding, WaitingSpare
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout import planner
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.placement import missing_copies
from deadpool_megatron.layout.planner import NoRestore, Seating, keep_line
from deadpool_megatron.layout.records import EpochRecord, NodeAddress, Restore, Seat
from deadpool_megatron.layout.schemes import losses_survived


def seating(turn: Turn, leaving: frozenset[int]) -> Seating:
    """Return who would play which role now, if these nodes had none. Wrong ones never have one."""
    state = turn.state
    members = state.fleet.members
    return planner.assign_seats(
        state.seats,
        {place: member.incarnation for place, member in members.items()},
        warm=frozenset(p for p, m in members.items() if m.status is MemberStatus.WARM),
        leaving=leaving | state.fleet.wrong,
        avoid=state.fleet.avoid,
    )


def drained(state: State) -> frozenset[int]:
    """Nodes whose roles have moved while other drains are open: not to be moved to by those."""
    return state.fleet.drains - state.seats.nodes


def decide(turn: Turn) -> None:
    """Choose seats and restore from what is known now; immediate, unless a kill is under way."""
    if turn.state.fleet.members.killed:
        _wait_for_reaping(turn)
        return
    if turn.state.last_words is not None:
        dump(turn)
        return
    fleet = turn.state.fleet
    not_to = drained(turn.state) if fleet.leaving - fleet.wrong else frozenset[int]()
    seats = seating(turn, fleet.leaving | not_to)
    if seats.unseated and fleet.leaving - fleet.wrong:
        # The spare for the drain has gone in the meantime.
        fleet = replace(fleet, leaving=fleet.leaving & fleet.wrong)
        turn.state = turn.state._replace(fleet=fleet)
        seats = seating(turn, fleet.leaving)
    restore = planner.choose_restore(turn.restore_query(seats.seats))
    if (isinstance(restore, NoRestore) or restore.kind != "memory") and must_look(turn):
        return
    if isinstance(restore, NoRestore):
        if turn.state.fleet.returning:
            _wait_for_return(turn, restore.reason)
        elif (k := turn.config.finished) and turn.state.restarted and not turn.state.survived:
            # Nothing starts from nothing by itself; what is left in memory is not removed for it.
            anew = f"iteration {k} was finished; --from-scratch begins again at 0"
            finish(turn, 2, with_struck(turn, f"{restore.reason}; {anew}"), keeps_slots=True)
        else:
            dump_held(turn, LastWords(1, with_struck(turn, _with_scheme(turn, restore.reason))))
        return
    if seats.unseated:
        _wait_for_spare(turn, f"roles {list(seats.unseated)} wait for a spare node to join")
        return
    nodes = record_nodes(turn.state, seats.seats)
    if why := protection.settle(turn, seats.seats, nodes, restore):
        _wait_or_end(turn, why, restore)
        return
    state = turn.state
    recovery, plan = state.recoveries.current, state.protection.plan
    record = EpochRecord(
        epoch=state.epoch + 1,
        seats=seats.seats,
        nodes=nodes,
        restore=restore,
        replicas=losses_survived(turn.config.settings, plan),
        protection=plan,
        emitted_up_to=state.line.newest,
        fewer_copies=owed_copies(seats.seats, nodes, turn),
        cause="; then ".join(recovery.causes) if recovery else "start",
        history=_history(state, restore),
    )
    # A journal that cannot be written for a while is tried again until then.
    deadline = turn.now + 2 * turn.config.settings.spare_timeout_seconds
    turn.state = state._replace(epoch=record.epoch, doing=Deciding(deadline, record))
    turn.act(WriteRecord(record))


def record_nodes(state: State, seats: Mapping[int, Seat]) -> dict[int, NodeAddress]:
    """All live nodes as a record names them; who has no seat is a spare."""
    training = {seat.node for seat in seats.values()}
    return {
        node: NodeAddress(known.host, known.vault_port, known.domain, spare=node not in training)
        for node, known in sorted(state.fleet.nodes.items())
    }


def owed_copies(
    seats: Mapping[int, Seat], nodes: Mapping[int, NodeAddress], turn: Turn
) -> frozenset[int]:
    """Roles that have fewer copies than wanted if these nodes play them."""
    return missing_copies(
        {role: seat.node for role, seat in seats.items()},
        {node: address.domain for node, address in nodes.items()},
        {node for node, address in nodes.items() if address.spare},
        losses_survived(turn.config.settings, turn.state.protection.plan),
    )


def _with_scheme(turn: Turn, reason: str) -> str:
    """Return why nothing can be restored, and the choice that has led to it."""
    kind = turn.state.protection.plan.kind
    if turn.state.fleet.gone and kind.is_local:
        return (
            f"--deadpool-protection {kind} keeps the state of a node on that node only, and one was"
            f" lost: {reason}; save checkpoints more often, or protect with buddy or parity"
        )
    return reason


def _wait_for_reaping(turn: Turn) -> None:
    """Wait: whether a slot gets a new process in place is known only when the old one has ended."""
    if not isinstance(turn.state.doing, WaitingSpare):
        turn.enter(Closing(turn.now + turn.config.settings.gather_seconds))


def _wait_for_spare(turn: Turn, text: str) -> None:
    """Another node can help; ``text`` is told when the wait begins."""
    if not isinstance(turn.state.doing, WaitingSpare):
        limit = turn.config.settings.spare_timeout_seconds
        turn.enter(WaitingSpare(turn.now + limit))
        turn.emit(Kind.WAITING_FOR_SPARE, text=text, limit_seconds=limit)


def _wait_for_return(turn: Turn, reason: str) -> None:
    """Wait: what is missing may lie in memory of a host whose agent ended: it can be started
    again."""
    limit, nodes = turn.config.settings.spare_timeout_seconds, sorted(turn.state.fleet.returning)
    text = f"nodes {nodes} have {limit:g} s to come back with what they hold in memory"
    _wait_for_spare(turn, f"{reason}: {text}")


def _wait_or_end(turn: Turn, why: str, restore: Restore) -> None:
    """Wait for another node, which can help, unless the run is only about to begin."""
    if not turn.state.line.ever_ran and restore.kind != "memory":
        finish(turn, 2, why)
    else:
        limit = turn.config.settings.spare_timeout_seconds
        _wait_for_spare(turn, f"{why}; waits {limit:g} s for a node to join")


def _history(state: State, restore: Restore) -> History:
    """Return what the record of the next epoch, restored from ``restore``, says of the run so
    far."""
    recovery = state.recoveries.current
    again = 0 if recovery is None else recovery.recomputed(restore)
    return History(
        kept=keep_line(state.line.kept, restore, state.epoch + 1),
        gone=dict(sorted(state.fleet.gone.items())),
        wrong=state.fleet.wrong,
        wrong_hosts=state.fleet.wrong_hosts,
        nonfinite=state.blame.nonfinite,
        struck=state.line.struck,
        failures=tuple(failure.to_record(k) for k, failure in state.blame.failures),
        recoveries=state.recoveries.count + (recovery is not None),
        steps_recomputed=state.recoveries.steps_recomputed + again,
        protection_told=state.protection.told,
    )
