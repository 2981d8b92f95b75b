"""Which inputs may lead to work over all roles: in a large run others are not to wait for it. Pure.

Most inputs are one of thousands of their kind, and only the last one of these leads further.
"""

from __future__ import annotations

from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.state.phases import Closing, Heard, Pausing, Phase
from deadpool_megatron.cluster.machine.state.state import State

# With fewer it takes a few tens of milliseconds at most.
_MANY_ROLES = 1024


def goes_far(state: State, event: ev.Input, now: float) -> bool:
    """Returns whether handling the input may take long; False is certain to be short."""
    roles, doing, fleet = len(state.seats), state.doing, state.fleet
    if roles < _MANY_ROLES:
        return False
    gathering = doing.phase is Phase.GATHERING
    match event:
        case ev.Tick():
            late = doing.deadline is not None and now >= doing.deadline
            suspicion = state.blame.suspicion
            return late or (suspicion is not None and now >= suspicion.until)
        case ev.NodeJoined():
            known = state.seats.nodes if state.record is None else state.record.nodes
            return not gathering or len(fleet.nodes) + len(fleet.gone) + 1 >= len(known)
        case ev.NodeInventory():
            return not isinstance(doing, Closing) or len(doing.awaited) <= 1
        case ev.MemberHello():
            places = state.seats.role_by_place
            others = (one for one in fleet.members.starting if one != (event.node, event.slot))
            return gathering and not any(place in places for place in others)
        case ev.MemberRegistered():
            known_roles = state.memory.layouts
            return len(known_roles) + 1 >= roles and event.layout.role not in known_roles
        case ev.Restored():
            return len(state.restored) + 1 >= roles
        case ev.MemberDone():
            return isinstance(doing, Heard) and len(doing.done) + 1 >= roles
        case ev.Paused():
            if not isinstance(doing, Pausing):
                return True
            return len(doing.order.paused) + len(doing.done) + 1 >= roles
        case ev.MemberWarm():
            return bool(fleet.drains) or not gathering
        case ev.StepReported():
            return state.recoveries.current is not None
        case ev.FactsTold() | ev.PhaseReported() | ev.Exposed() | ev.StackTaken():
            return False
        case _:
            return True
