"""Nodes come, and the first epoch is decided when enough of them are there.

Pure functions on a Turn.
"""

from __future__ import annotations

from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.actions import DropNode, Welcome
from deadpool_megatron.cluster.machine.epoch import deciding, pausing
from deadpool_megatron.cluster.machine.epoch.closing import drop_node, silent
from deadpool_megatron.cluster.machine.epoch.deciding import decide, seating
from deadpool_megatron.cluster.machine.epoch.ending import finish
from deadpool_megatron.cluster.machine.gathering import checkup, takeover
from deadpool_megatron.cluster.machine.state.phases import LAST_PHASES, Phase
from deadpool_megatron.cluster.machine.state.roster import MemberStatus, NodeState, Place
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind


def node_joined(turn: Turn, event: ev.NodeJoined) -> None:
    state, node = turn.state, event.node
    left_behind = takeover.left_behind(turn, event)
    if state.phase in LAST_PHASES or node in state.gone or node in state.nodes or left_behind:
        why = left_behind or state.gone.get(node, "it is connected already")
        why = "the run is ending" if state.phase in LAST_PHASES else why
        turn.refuse(f"join of node {node}", why, node)
        if node not in state.nodes:
            turn.act(DropNode(node, why))
        return
    if why := checkup.objection(turn, event):
        turn.act(DropNode(node, why, left_out=True))
        return
    address = event.host, event.vault_port, event.domain
    joined = NodeState(*address, event.memory_bytes, event.returns, facts=event.facts)
    turn.set(nodes=state.nodes.set(node, joined))
    if event.found is not None:
        turn.set(found=state.found.set(node, event.found))
    spare = node not in state.seats.nodes
    turn.emit(Kind.NODE_JOINED, node=node, host=event.host, spare=spare)
    turn.act(Welcome(node, state.record))
    to_start: dict[int, int] = {}
    for slot in range(turn.config.nproc):
        if slot in event.members:
            running = event.members[slot]
            turn.member((node, slot), MemberStatus.RUNNING, incarnation=running)
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
    if state.phase is Phase.WAITING_SPARE:
        deciding.decide(turn)
    check_gathered(turn)
    pausing.consider_pause(turn)


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


def gathered_enough(turn: Turn, waited: str) -> None:
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
        drop_node(turn, node, silent(node, "did not start its members in time"))
    unseated = seating(turn, frozenset()).unseated
    if unseated:
        who = ", ".join(f"node {n}: {why}" for n, why in sorted(turn.state.gone.items()))
        finish(turn, 2, f"no members for roles {list(unseated)} ({who or waited})")
    else:
        decide(turn)
