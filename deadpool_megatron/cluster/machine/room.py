"""Room for generations where the scheme is chosen (``mixed``): no plan whose memory the nodes lack.

How the members lay out their state is known when all have registered, in the first epoch; a plan
that does not fit then is left at once, before a copy of anything is waited for. Later the nodes
change with the epochs only, so it is looked at whenever one is decided. Pure functions on a Turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deadpool_megatron.cluster.machine.ending import finish
from deadpool_megatron.cluster.machine.plan_facts import (
    best_plan,
    budgets_of,
    lacking,
    scene_of,
)
from deadpool_megatron.cluster.machine.state import Phase, State, Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.demand import Scene
from deadpool_megatron.layout.inventories import usual_layouts
from deadpool_megatron.layout.records import NodeAddress, Restore, Seat
from deadpool_megatron.layout.schemes import plan_in_words


def unfit(turn: Turn) -> str:
    """Why the epoch that is being opened must be left for another plan, which is in the state then;
    empty when it need not."""
    state = turn.state
    if not state.mixed or state.phase is not Phase.OPENING or state.record is None:
        return ""
    if state.protection != state.record.protection:
        return ""  # another plan comes anyway
    words = plan_in_words(state.protection)
    if why := _settle(turn, scene_of(state, turn.config.settings)):
        return why
    changed = turn.state.protection != state.protection
    return f"{words} needs more memory than there is" if changed else ""


def settle(turn: Turn, seats: Mapping[int, Seat], nodes: Mapping[int, NodeAddress]) -> str:
    """Have a plan in the state that these nodes have memory for; answers why there is none."""
    if not turn.state.mixed:
        return ""
    return _settle(turn, scene_of(_with_layouts(turn), turn.config.settings, seats, nodes))


def _settle(turn: Turn, scene: Scene | None) -> str:
    state, budgets = turn.state, budgets_of(turn.state)
    if scene is None or not budgets:
        return ""
    if lacking(state.protection, replace(scene, roomy=True), budgets) is None:
        return ""
    choice = best_plan(scene, budgets, None, state.protection.every)
    if lacking(choice.plan, scene, budgets) is not None:
        return f"--deadpool-protection mixed: {choice.why}: raise --deadpool-memory-gb or add nodes"
    plan = replace(choice.plan, every=state.protection.every)
    if plan != state.protection:
        turn.set(protection=plan, protection_why=f"for want of memory: {choice.why}")
    return ""


def wait_or_end(turn: Turn, why: str, restore: Restore) -> None:
    """No plan fits: another node can help, unless the run is only about to begin."""
    if not turn.state.ever_ran and restore.kind != "memory":
        finish(turn, 2, why)
    elif turn.state.phase is not Phase.WAITING_SPARE:
        limit = turn.config.settings.spare_timeout_seconds
        turn.set(phase=Phase.WAITING_SPARE, deadline=turn.now + limit, pending=None, redecide=None)
        turn.emit(Kind.LOG, level="warning", text=f"{why}; waits {limit:g} s for a node to join")


def _with_layouts(turn: Turn) -> State:
    """The state, with the layouts that a coordinator that took over has only from the slots."""
    state = turn.state
    unknown = {role for role in range(turn.config.world_size) if role not in state.layouts}
    if not unknown:
        return state
    found = usual_layouts(unknown, state.held.values())
    return state.changed({"layouts": state.layouts.update(found)})
