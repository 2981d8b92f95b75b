"""Nodes come, and the first epoch is decided when enough of them are there."""

from __future__ import annotations

from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.actions import DropNode, Welcome
from deadpool_megatron.cluster.machine.epoch import pausing
from deadpool_megatron.cluster.machine.epoch.closing import drop_node, silent
from deadpool_megatron.cluster.machine.epoch.deciding import decide, seating
from deadpool_megatron.cluster.machine.epoch.ending import finish
from deadpool_megatron.cluster.machine.gathering import checkup, takeover
from deadpool_megatron.cluster.machine.state.fleet import MemberStatus, NodeState, Place
from deadpool_megatron.cluster.machine.state.phases import (
    LAST_PHASES,
    Gathering,
    Rejoining,
    WaitingSpare,
)
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind


def node_joined(turn: Turn, event: ev.NodeJoined) -> None:
    """A node has come: welcome it and have its members started, or turn it away."""
    state, node = turn.state, event.node
    if why := _refusal(turn, event):
        turn.refuse(f"join of node {node}", why, node)
        if node not in state.fleet.nodes:
            turn.act(DropNode(node, why))
        return
    address = event.host, event.vault_port, event.domain
    joined = NodeState(*address, event.memory_bytes, event.returns, facts=event.facts)
    is_wrong, brings_nothing = joined.host_name in state.fleet.wrong_hosts, checkup.is_new(event)
    if is_wrong and brings_nothing:
        why = f"left out: {joined.host_name} was put aside for the rest of this run"
        turn.refuse(f"join of node {node}", why, node)
        turn.act(DropNode(node, why, left_out=True))
        return
    if why := checkup.objection(turn, event):
        turn.act(DropNode(node, why, left_out=True))
        return
    fleet = state.fleet.with_node(node, joined)
    if is_wrong:  # what it brings may be wanted, but it gets no role
        fleet = fleet.found_wrong(node, joined.host_name)
    turn.state = state._replace(fleet=fleet)
    if event.found is not None:
        turn.state = turn.state._replace(memory=state.memory.with_found(node, event.found))
    spare = node not in state.seats.nodes
    turn.emit(Kind.NODE_JOINED, node=node, host=event.host, spare=spare)
    turn.act(Welcome(node, state.record))
    to_start: dict[int, int] = {}
    for slot in range(turn.config.nproc):
        if slot in event.members:
            turn.set_member((node, slot), MemberStatus.RUNNING, event.members[slot])
        else:
            # What an earlier coordinator started has been there already.
            was_there = state.record is not None and node in state.record.nodes
            role = state.seats.role_by_place.get((node, slot))
            seated = 0 if role is None else state.seats[role].incarnation
            known = seated if was_there else -1
            to_start[slot] = max(known, event.incarnations.get(slot, -1)) + 1
    takeover.note_join(turn, event)
    if spare:
        checkup.look_again(turn, node, fresh=not event.epoch and event.found is None)
    if to_start and not turn.config.check_only:
        turn.start_members(node, to_start)
    if isinstance(state.doing, WaitingSpare):
        decide(turn)
    check_gathered(turn)
    pausing.consider_pause(turn)


def _refusal(turn: Turn, event: ev.NodeJoined) -> str:
    """Return why a node cannot join; empty when it can."""
    state, node = turn.state, event.node
    if state.phase in LAST_PHASES:
        return "the run is ending"
    if left_behind := takeover.left_behind(turn, event):
        return left_behind
    if node in state.fleet.gone:
        return state.fleet.gone[node]
    return "it is connected already" if node in state.fleet.nodes else ""


def check_gathered(turn: Turn) -> None:
    """Decide the first epoch when all wished nodes are judged and run their members; after a
    takeover continue when all have rejoined.

    Spares are no condition, but get ``connect_seconds`` to join, so that the first record has them.
    """
    match turn.state.doing:
        case Rejoining() as rejoining if turn.state.record is not None:
            takeover.check_all_back(turn, rejoining, turn.state.record)
        case Gathering() as gathering:
            begun = gathering.checkup is not None or turn.state.agreed is not None
            if not begun and not _enough_have_come(turn, gathering.deadline):
                return
            if checkup.is_judged(turn, gathering) and not _seated_is_starting(turn.state):
                seats = seating(turn, turn.state.fleet.leaving)
                places = [(seat.node, seat.slot) for seat in seats.seats.values()]
                if not seats.unseated and all(_runs(turn, place) for place in places):
                    decide(turn)


def _enough_have_come(turn: Turn, deadline: float) -> bool:
    # The counts are looked at first: this is asked for every join and every hello.
    fleet, config = turn.state.fleet, turn.config
    began = deadline - config.settings.start_seconds
    patient = turn.now < began + config.settings.connect_seconds or config.check_only
    wanted = config.nodes + (config.spares if patient else 0)
    return len(fleet.nodes) + len(fleet.gone) >= wanted and not fleet.absent(turn.state.seats.nodes)


def _seated_is_starting(state: State) -> bool:
    """Return whether a member whose own role waits for it did not say hello yet."""
    places = state.seats.role_by_place
    return any(place in places for place in state.fleet.members.starting)


def _runs(turn: Turn, place: Place) -> bool:
    return turn.state.fleet.members[place].status in (MemberStatus.RUNNING, MemberStatus.WARM)


def gathered_enough(turn: Turn, waited: str) -> None:
    """Go on without the late ones if spares can take their place, else end the run."""
    fleet = turn.state.fleet
    fleet = fleet.given_up(fleet.absent(turn.state.seats.nodes), "did not join in time")
    turn.state = turn.state._replace(fleet=fleet)
    if not isinstance(turn.state.doing, Gathering) or not checkup.is_judged(turn, turn.state.doing):
        return
    fleet = turn.state.fleet
    for node in sorted({place[0] for place in fleet.members if not _runs(turn, place)}):
        drop_node(turn, node, silent(node, "did not start its members in time"))
    unseated = seating(turn, frozenset()).unseated
    if unseated:
        who = ", ".join(f"node {n}: {why}" for n, why in sorted(turn.state.fleet.gone.items()))
        finish(turn, 2, f"no members for roles {list(unseated)} ({who or waited})")
    else:
        decide(turn)
