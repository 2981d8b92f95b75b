"""Memory for generations in a run with ``mixed``: one choice at the start, none afterwards.

How the members lay out their state is known when all have built it, in the first epoch, or from
the slots of a run that goes on from memory. The rule (layout.choice) is applied then, before
anything is computed. Later nodes may be lost: a plan that the others lack memory for is not changed
for another one; the run waits for a node to join, and is saved if none does. Pure functions on a
Turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from deadpool_megatron.cluster.machine.ending import finish
from deadpool_megatron.cluster.machine.plans import budgets_of, refusal, scene_of
from deadpool_megatron.cluster.machine.state import Phase, State, Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.choice import choose, lacking
from deadpool_megatron.layout.demand import Scene
from deadpool_megatron.layout.inventories import usual_layouts
from deadpool_megatron.layout.records import NodeAddress, Restore, Seat
from deadpool_megatron.layout.schemes import plan_in_words

_MIXED = "mixed"


def unfit(turn: Turn) -> str:
    """Return why the first epoch must be left for another plan, which is in the state then; empty
    when it need not. To be asked once, when the last member has said how it lays out its state."""
    state, record = turn.state, turn.state.record
    if state.phase is not Phase.OPENING or record is None or record.restore.kind == "memory":
        return ""
    if turn.config.settings.protection != _MIXED or state.protection != record.protection:
        return ""
    if why := _choose(turn, scene_of(state, turn.config.settings)):
        return why
    changed = turn.state.protection != record.protection
    return f"{plan_in_words(record.protection)} needs more memory than there is" if changed else ""


def settle(
    turn: Turn, seats: Mapping[int, Seat], nodes: Mapping[int, NodeAddress], restore: Restore
) -> str:
    """Return why these nodes cannot keep what is to be restored; empty when they can.

    Where training begins, the state has a plan then that fits.
    """
    settings = turn.config.settings
    if settings.protection != _MIXED:
        return ""
    state = _with_layouts(turn)
    scene = scene_of(state, settings, seats, nodes)
    if state.restarted or restore.kind != "memory":
        return _choose(turn, scene)
    if scene is None:
        return ""
    lack = lacking(state.protection, scene, budgets_of(state))
    return "" if lack is None else f"{plan_in_words(state.protection)}: {lack.in_words()}"


def _choose(turn: Turn, scene: Scene | None) -> str:
    state, budgets = turn.state, budgets_of(turn.state)
    if scene is None or not budgets:
        return ""
    if lacking(state.protection, replace(scene, roomy=True), budgets) is None:
        return ""
    choice = choose(scene, budgets, state.protection.every)
    why = choice.lack.in_words() if choice.lack is not None else ""
    why = why or refusal(choice.plan, len(scene.domains), turn.config.settings)
    if why:
        words = plan_in_words(choice.plan)
        return (
            f"--deadpool-protection mixed: {choice.why}, {words} needs least: {why}: raise"
            " --deadpool-memory-gb or add nodes"
        )
    if choice.plan != state.protection:
        turn.set(protection=choice.plan, protection_why=f"for want of memory: {choice.why}")
    return ""


def wait_or_end(turn: Turn, why: str, restore: Restore) -> None:
    """Wait for another node, which can help, unless the run is only about to begin."""
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
