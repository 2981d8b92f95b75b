"""Pauses of all members at the same iteration: before a drain, another protection plan, the supply
of missing copies, a larger size, or the dump at the end. By then all that was computed is
committed, so the close that follows loses nothing."""

from __future__ import annotations

from deadpool_megatron.cluster.machine import epoch, inputs, shutdown, state as states
from deadpool_megatron.cluster.machine.actions import Pause
from deadpool_megatron.cluster.machine.blame import Failure, FinalStatus
from deadpool_megatron.cluster.machine.chosen_plan import pause_cause, take_request
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.elasticity import can_grow
from deadpool_megatron.cluster.machine.state import Entering, PauseOrder, Pausing, Running, State
from deadpool_megatron.events import Kind
from deadpool_megatron.failures import ExitStatus, FailureKind
from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.layout.records import next_due
from deadpool_megatron.layout.schemes import format_plan

# Share of the time left to a run; the dump that follows needs the other part.
_SHARE_OF_PAUSE = 0.2


def begin(core: Core, running: Running) -> None:
    """Start the work that had to wait until the epoch opened."""
    running.has_begun = True
    if running.pause is not None:
        _pause(core, running.pause)
    consider_pause(core)


def consider_pause(core: Core) -> None:
    """Pause the running job if a wanted drain, a wanted plan or missing copies can now be served.
    Otherwise set the time to grow, if a larger size fits."""
    state, record, running = core.state, core.state.record, core.state.phase_state
    if not isinstance(running, Running) or not _is_running(state) or record is None:
        return
    for node in sorted(state.fleet.drains & state.seats.nodes):
        if not epoch.seating(core, epoch.barred_nodes(state) | {node}).unseated:
            _pause_next(core, f"drain of node {node}", frozenset({node}))
            return
    if state.protection.plan != record.protection:
        _pause_next(core, pause_cause(state))
        return
    # Some role that has too few copies by the record would have enough with the present nodes.
    if record.fewer_copies and record.fewer_copies - epoch.missing_copies_with(core, record.seats):
        _pause_next(core, "a new node can hold the missing copies")
        return
    grows_at = running.deadline or core.now + core.settings.settle_seconds
    running.deadline = grows_at if can_grow(core) else None


def grow(core: Core) -> None:
    """Pause for a larger size, if it still fits after the time to settle."""
    if _is_running(core.state) and can_grow(core):
        _pause_next(core, "more model replicas fit", grows=True)
    else:
        consider_pause(core)


def _is_running(state: State) -> bool:
    """Return whether training runs, without a suspicion that may end it."""
    return isinstance(state.phase_state, Running) and state.blame.suspicion is None


def _pause(core: Core, order: PauseOrder) -> None:
    """Have all members pause, if the epoch runs."""
    running, record = core.state.phase_state, core.state.record
    if isinstance(running, Running) and record is not None:
        limit = core.settings.hang_seconds * record.protection.every
        core.state.phase_state = Pausing(core.now + limit, order, running.done)
        core.act(Pause(record.epoch, order.iteration))
        check_paused(core)


def _pause_next(
    core: Core, cause: str, draining: frozenset[int] = frozenset(), *, grows: bool = False
) -> None:
    iteration = _boundary_after(core.state, core.state.reached)
    _pause(core, PauseOrder(iteration, cause, draining, grows=grows))


def _boundary_after(state: State, iteration: int) -> int:
    """Return a later iteration with a protected generation. A role may be in ``iteration`` + 1
    already, so the first candidate is the iteration after that."""
    every = 1 if state.record is None else state.record.protection.every
    return next_due(iteration + 2, every)


# Reasons for a pause.


def drain(core: Core, node: int) -> None:
    """Have the roles of the node move as soon as a spare can take them."""
    core.emit(Kind.DRAIN, node=node)
    core.state.fleet.drains |= {node}
    consider_pause(core)


def drain_slow(core: Core, event: inputs.DrainRequested) -> None:
    """Have the roles of a slow node moved away."""
    state, node = core.state, event.node
    state.fleet.distrust(frozenset({node}) & state.fleet.nodes.keys())
    if node not in state.fleet.nodes:
        core.refuse("drain", f"node {node} is not connected", node)
    elif node not in state.seats.nodes:
        core.emit(Kind.DRAIN, node=node)
        core.log("info", f"node {node} has no role to move away", node)
    else:
        drain(core, node)
        if isinstance(state.phase_state, Running):
            core.log("warning", f"the drain of node {node} waits for a spare node", node)


def change_protection(core: Core, event: inputs.ProtectionRequested) -> None:
    """Change to another plan, as a measurement advises."""
    if reason := take_request(core, event):
        core.refuse(f"protection {format_plan(event.plan)}", reason)
    consider_pause(core)


def dump_requested(core: Core, event: inputs.DumpRequested) -> None:
    """Start a dump, in any phase. A run that trains pauses first, so that the next run need not
    compute the iteration under way again. If the event gives a number of seconds, a share of them
    is spent on the pause."""
    state = core.state
    is_small = len(state.seats) < core.config.world_size
    exports = is_small and event.seconds is None  # a dump can be used only at its own size
    final = FinalStatus(ExitStatus.SAVED, event.reason, exports=exports)
    if isinstance(state.phase_state, states.Dumping):
        shutdown.expedite(core, state.phase_state, event.reason)
        return
    if state.final is None:
        is_running = _is_running(state)
        if not is_running and not isinstance(state.phase_state, Pausing):
            epoch.save_and_end(core, final, FailureKind.PLANNED)
            return
        if is_running:
            _pause_next(core, event.reason)
        state.final = final
    if isinstance(state.phase_state, Pausing) and event.seconds is not None:
        limit = core.now + _SHARE_OF_PAUSE * event.seconds
        state.phase_state.deadline = min(state.phase_state.deadline, limit)


# Reports of members.


def note_done(core: Core, event: inputs.MemberDone) -> None:
    """Note that a role has completed its last iteration: no pause waits for it."""
    role, phase_state = core.sender_role(event), core.state.phase_state
    if role is not None and isinstance(phase_state, Entering | Running | Pausing):
        phase_state.done.add(role)
        if rank_of(role) == 0:  # only this role knows how the program ended
            core.state.early, core.state.unsaved = event.early, event.unsaved
        epoch.check_done(core)
        check_paused(core)


def note_paused(core: Core, event: inputs.Paused) -> None:
    """Note that a role pauses after an iteration.

    If this coordinator has not ordered the pause, an earlier coordinator did. Only a close lets the
    member continue, and nothing is recomputed if all members pause at the same iteration.
    """
    role, phase_state, iteration = core.sender_role(event), core.state.phase_state, event.iteration
    if role is None:
        return
    if isinstance(phase_state, Pausing):
        if iteration != phase_state.order.iteration:
            core.refuse(f"pause of role {role}", f"no request waits for a pause at {iteration}")
            return
        phase_state.order.paused.add(role)
        check_paused(core)
        return
    earlier = phase_state.pause if isinstance(phase_state, Entering) else None
    paused = set[int]() if earlier is None else earlier.paused
    if earlier is not None and earlier.iteration != iteration:
        paused, iteration = set(), max(earlier.iteration, iteration)
    cause = "a pause that was ordered before the coordinator changed"
    order = PauseOrder(iteration, cause, paused=paused | {role})
    if isinstance(phase_state, Entering):
        phase_state.pause = order
    else:
        _pause(core, order)


def pause_later(core: Core, event: inputs.PauseRefused) -> None:
    """Order the pause at a later iteration, as a role is past the wanted iteration. The deadline
    stays."""
    state, pausing, iteration = core.state, core.state.phase_state, event.iteration
    if core.sender_role(event) is None:
        return
    if isinstance(pausing, Pausing) and iteration >= pausing.order.iteration and state.record:
        pausing.order.iteration = _boundary_after(state, max(state.reached, iteration))
        pausing.order.paused = set()
        core.act(Pause(state.record.epoch, pausing.order.iteration))


def check_paused(core: Core, *, overdue: bool = False) -> None:
    """Close the epoch, as after a failure, once all members pause or the time for it is over."""
    pausing, wanted = core.state.phase_state, len(core.state.seats)
    if not isinstance(pausing, Pausing):
        return
    order, paused, done = pausing.order, pausing.order.paused, pausing.done
    # The sizes are compared first, which is cheap. The sets may overlap, as a role that is done may
    # have paused before.
    complete = len(paused) + len(done) >= wanted and len(paused | done) == wanted
    if overdue or complete:
        core.state.fleet.draining, core.state.grows = order.draining, order.grows
        epoch.close(core, Failure(order.cause, FailureKind.PLANNED))
