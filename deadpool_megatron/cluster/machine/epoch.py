"""The life of an epoch: close, decide, open, in the order of a recovery.

A failure in any phase leads back to a decision; an announced epoch is closed exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.machine import elasticity, inputs as ev, shutdown, state as states
from deadpool_megatron.cluster.machine.actions import Announce, CloseEpoch, WriteRecord
from deadpool_megatron.cluster.machine.blame import Failure, FinalStatus, Suspicion
from deadpool_megatron.cluster.machine.chosen_plan import report_plan
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.events import Kind
from deadpool_megatron.failures import ExitStatus, FailureKind
from deadpool_megatron.layout import planner, records
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.placement import missing_copies
from deadpool_megatron.layout.planner import NoRestore, Seating
from deadpool_megatron.layout.ranks import rank_of
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat, SeatTable
from deadpool_megatron.layout.schemes import losses_survived

# The first word in the signature of failures for which a change of size is not to blame.
_NOT_OF_SIZE = ("node", "nonfinite", "audit")

# Close.


def close(core: Core, failure: Failure, *, silent_seconds: float = 0.0) -> None:
    """Force a new decision, in any phase, because something failed or has to change."""
    state = core.state
    match state.phase_state:
        case states.Opening() | states.Running() | states.Pausing() if state.record is not None:
            _close_open(core, state.record, failure, silent_seconds)
        case states.Closing():
            state.recoveries.add_cause(failure)
            check_closed(core)
        case states.Deciding() as deciding:
            deciding.redecide = failure
        case states.WaitingSpare():
            decide(core)
        case states.TakingOver(missed=None) as taking_over:
            taking_over.missed = failure


def save_and_end(core: Core, final: FinalStatus, kind: FailureKind | None = None) -> None:
    """Close the epoch, in any phase, save the newest generation, and end with ``final``. ``kind``:
    the kind of failure for which the epoch is closed, if it is not that of ``final``."""
    state = core.state
    if state.phase in states.LAST_PHASES or state.final is not None:
        return
    state.final = final
    if isinstance(state.phase_state, states.Bootstrapping):
        shutdown.dump(core)  # there is no epoch yet
    else:
        close(core, Failure(final.reason, kind or final.kind or FailureKind.CORRUPT_STATE))


def _close_open(core: Core, record: EpochRecord, failure: Failure, silent_seconds: float) -> None:
    state, suspicion = core.state, core.state.blame.suspicion
    if state.is_changing and failure.signature and failure.signature[0] not in _NOT_OF_SIZE:
        elasticity.note_failure(core, elasticity.present_size(core), failure.cause)
    elif failure.signature:
        note_failure(core, failure)
    last_sign_at = min(core.now - silent_seconds, suspicion.at if suspicion else core.now)
    core.act(CloseEpoch(record.epoch, failure.cause))
    core.emit(Kind.EPOCH_CLOSED, node=failure.node, cause=failure.cause, kind=failure.kind)
    live = {node for node in record.nodes if node in state.fleet.nodes}
    state.phase_state = states.Closing(core.now + core.settings.gather_seconds, live)
    state.recoveries.close(failure, last_sign_at, core.now, state.lineage.newest, record)
    state.memory.at_close = {}
    state.blame.suspicion = None
    state.lineage.is_inspected = False
    check_closed(core)


def note_failure(core: Core, failure: Failure) -> None:
    """Count a failure; if it repeats without a new iteration in between, mark the run to be saved
    and ended."""
    state, allowed = core.state, core.settings.restarts_in_place
    state.blame.note_failure(state.reached, failure)
    state.final = state.final or state.blame.crash_loop(allowed)


def check_closed(core: Core) -> None:
    """Decide once every live node has sent its inventory and no killed process is left."""
    closing, fleet = core.state.phase_state, core.state.fleet
    if not isinstance(closing, states.Closing) or closing.awaited:
        return
    if not fleet.places_with(states.MemberStatus.KILLED):
        core.state.recoveries.spend("close", core.now)
        decide(core)


def checkpoints_inspected(core: Core, event: ev.CheckpointsFound) -> None:
    """Note that the checkpoints were inspected, and drop those that are missing."""
    lineage = core.state.lineage
    for path in sorted(event.missing & {restore.path for restore in lineage.valid}):
        core.log("warning", f"checkpoint {path} does not exist any more, or is not what was saved")
    lineage.remove(event.missing)
    lineage.is_inspected = True
    check_closed(core)


def note_inventory(core: Core, event: ev.NodeInventory) -> None:
    """Note the inventory of a node that has closed the epoch: the promise of its vault."""
    state, inventory = core.state, event.inventory
    if state.record is None or inventory.epoch != state.record.epoch:
        core.refuse("inventory", node=inventory.node, **core.not_open(inventory.epoch))
        return
    if isinstance(state.phase_state, states.Reporting):
        # The agent has only now carried out the order of an earlier coordinator.
        cause = f"node {inventory.node} has closed epoch {inventory.epoch} already"
        close(core, Failure(cause, FailureKind.COORDINATOR))
    match state.phase_state:
        case states.Closing(awaited=awaited) if inventory.node in awaited:
            awaited.remove(inventory.node)
            state.memory.at_close[inventory.node] = inventory
            check_closed(core)


# Decide.


def seating(core: Core, excluded: frozenset[int]) -> Seating:
    """Return the next seats, with none on ``excluded`` and on quarantined nodes."""
    fleet = core.state.fleet
    return planner.assign_seats(
        core.state.seats,
        {place: member.incarnation for place, member in fleet.members.items()},
        warm=frozenset(fleet.places_with(states.MemberStatus.WARM)),
        leaving=excluded | fleet.quarantined,
        deprioritized=fleet.deprioritized,
    )


def can_drain(core: Core, draining: frozenset[int]) -> bool:
    """Return whether spares that are not deprioritized can take all roles of ``draining``."""
    next_seats = seating(core, draining)
    spares = {seat.node for seat in next_seats.seats.values()} - core.state.seats.nodes
    return not next_seats.unseated and not spares & core.state.fleet.deprioritized


def barred_nodes(state: states.State) -> frozenset[int]:
    """Return the nodes without a role to which no drain may move a role: distrusted nodes, and
    nodes that were drained while other drains are open."""
    return (state.fleet.drains | state.fleet.distrusted) - state.seats.nodes


def decide(core: Core) -> None:
    """Choose the seats and the state to restore, unless killed processes have yet to end."""
    state, settings = core.state, core.settings
    fleet = state.fleet
    if fleet.places_with(states.MemberStatus.KILLED):
        # Their places can get new processes only when they have ended.
        if not isinstance(state.phase_state, states.WaitingSpare):
            state.phase_state = states.Closing(core.now + settings.gather_seconds)
        return
    if state.final is not None:
        shutdown.dump(core)
        return
    barred = barred_nodes(state) if fleet.draining - fleet.quarantined else frozenset[int]()
    seats = seating(core, fleet.draining | barred)
    if seats.unseated and fleet.draining - fleet.quarantined:
        # The spare for the drain has left in the meantime.
        fleet.draining &= fleet.quarantined
        seats = seating(core, fleet.draining)
    restore = planner.choose_restore(shutdown.restore_query(core, seats.seats))
    is_stuck = bool(seats.unseated) or elasticity.is_size_excluded(core)
    from_disk = isinstance(restore, NoRestore) or restore.kind != "memory"
    if (from_disk or (is_stuck and elasticity.allowed_sizes(core))) and shutdown.must_inspect(core):
        return
    if isinstance(restore, NoRestore):
        _handle_no_restore(core, restore.reason)
        return
    changes = is_stuck or state.grows or state.is_changing
    other = elasticity.other_size(core, stuck=is_stuck) if changes else None
    if other is not None and (not seats.unseated or _is_overdue(core)):
        seats, restore = other
    elif is_stuck:
        roles = [*map(rank_of, seats.unseated)] or "of a size that was struck off"
        text = f"roles {roles} wait for a spare node to join"
        then = {} if other is None else {"then": f"then {len(other[0].seats)} roles continue"}
        _wait_for_spare(core, text, **then)
        return
    recovery, plan = state.recoveries.current, state.protection.plan
    record = EpochRecord(
        epoch=state.epoch + 1,
        seats=seats.seats,
        nodes=_record_nodes(state, seats.seats),
        restore=restore,
        replicas=losses_survived(settings, plan),
        protection=plan,
        emitted_up_to=state.lineage.newest,
        fewer_copies=missing_copies_with(core, seats.seats),
        cause="; then ".join(recovery.causes) if recovery else "start",
        begins=state.restarted or not state.lineage.ever_ran,
        history=_history(core, restore),
    )
    state.epoch = record.epoch
    if isinstance(state.phase_state, states.WaitingSpare):
        state.recoveries.spend("wait", core.now)
    # While the journal cannot be written, the write is repeated until this deadline.
    state.phase_state = states.Deciding(core.now + 2 * settings.spare_timeout_seconds, record)
    core.act(WriteRecord(record))


def _is_overdue(core: Core) -> bool:
    waiting = core.state.phase_state
    return isinstance(waiting, states.WaitingSpare) and core.now >= waiting.deadline


def end_wait(core: Core) -> None:
    """Continue with fewer model replicas, as no spare has come; else end the run."""
    if elasticity.allowed_sizes(core):
        if core.state.fleet.places_with(states.MemberStatus.KILLED):
            return  # they end soon, or their node is given up
        decide(core)
    if _is_overdue(core):
        shutdown.dump(core)


def _record_nodes(state: states.State, seats: Mapping[int, Seat]) -> dict[int, records.NodeAddress]:
    """Return the addresses of all live nodes; a node without a seat is a spare."""
    training = {seat.node for seat in seats.values()}
    return {
        node: records.NodeAddress(
            node_state.host, node_state.vault_port, node_state.domain, spare=node not in training
        )
        for node, node_state in sorted(state.fleet.nodes.items())
    }


def missing_copies_with(core: Core, seats: Mapping[int, Seat]) -> frozenset[int]:
    """Return the roles that have fewer copies than wanted with these seats."""
    replicas = losses_survived(core.settings, core.state.protection.plan)
    return missing_copies(*records.nodes_of(seats, _record_nodes(core.state, seats)), replicas)


def _handle_no_restore(core: Core, reason: str) -> None:
    """Wait for nodes to return, or end the run, as nothing can be restored."""
    state = core.state
    if state.fleet.returning:
        # The missing state may be in memory of a host whose agent ended and can start again.
        limit = core.settings.spare_timeout_seconds
        nodes = f"nodes {sorted(state.fleet.returning)}"
        back = f"{nodes} have {limit:g} s to return with their state in memory"
        _wait_for_spare(core, f"{reason}: {back}")
    elif (k := core.config.finished) and state.restarted and not state.survived:
        # A run never starts from scratch by itself. The state in memory stays for another attempt.
        hint = f"iteration {k} was finished; --from-scratch begins again at 0"
        reason = shutdown.with_unloadable(core, f"{reason}; {hint}")
        shutdown.finish(core, FinalStatus(ExitStatus.BAD_INPUT, reason), keeps_slots=True)
    else:
        reason = shutdown.with_unloadable(core, _with_protection(core, reason))
        shutdown.dump_held(core, FinalStatus(1, reason))


def _with_protection(core: Core, reason: str) -> str:
    """Return the reason; if the plan of protection led to it, with the option to change."""
    kind = core.state.protection.plan.kind
    if core.state.fleet.removed and kind.is_local:
        return (
            f"--deadpool-protection {kind} keeps the state of a node on that node only, and one was"
            f" lost: {reason}; save checkpoints more often, or protect with buddy or parity"
        )
    return reason


def _wait_for_spare(core: Core, text: str, **then: Any) -> None:
    """Wait for a node that can help; ``text`` is reported when the wait begins. ``then``: how the
    run continues at another size after the wait; empty if the run ends then."""
    limit = elasticity.wait_seconds(core) if then else core.settings.spare_timeout_seconds
    waiting = core.state.phase_state
    if isinstance(waiting, states.WaitingSpare):
        waiting.deadline = waiting.since + limit
    else:
        core.state.phase_state = states.WaitingSpare(core.now + limit, core.now)
        core.emit(Kind.WAITING_FOR_SPARE, text=text, limit_seconds=limit, **then)


def _history(core: Core, restore: Restore) -> History:
    """Return the history of the run for the record of the next epoch, which restores
    ``restore``."""
    state, recovery = core.state, core.state.recoveries.current
    recomputed = 0 if recovery is None else recovery.recomputed(restore)
    history = History(
        kept=planner.keep_lineages(state.lineage.kept, restore, state.epoch + 1),
        removed=dict(sorted(state.fleet.removed.items())),
        quarantined=state.fleet.quarantined,
        quarantined_hosts=state.fleet.quarantined_hosts,
        distrusted=state.fleet.distrusted - state.fleet.removed.keys(),
        nonfinite=state.blame.nonfinite,
        invalidated=state.lineage.invalidated,
        failures=tuple({**each.to_dict(), "iteration": k} for k, each in state.blame.failures),
        recoveries=state.recoveries.count + (recovery is not None),
        steps_recomputed=state.recoveries.steps_recomputed + recomputed,
        reported_plan=state.protection.reported,
        start=state.start,
    )
    if not (sizes := state.memory.sizes) or sizes.replicas == (elasticity.present_size(core),):
        return history
    return replace(history, sizes=sizes, changes=state.changes)


def journal_written(core: Core, event: ev.JournalWritten) -> None:
    """Announce a record that is durable, or decide again if there was a failure meanwhile."""
    state, epoch = core.state, event.epoch
    deciding = state.phase_state
    if not isinstance(deciding, states.Deciding) or epoch != state.epoch:
        core.refuse("journal", f"epoch {epoch} is not being decided")
    elif deciding.redecide is None:
        _announce(core, deciding.pending)
    else:
        state.recoveries.add_cause(deciding.redecide)
        decide(core)


def journal_failed(core: Core, event: ev.JournalFailed) -> None:
    """End the run, as a record cannot be made durable."""
    if isinstance(core.state.phase_state, states.Deciding) and event.epoch == core.state.epoch:
        shutdown.cannot_decide(core, f"epoch {event.epoch} cannot be journalled: {event.text}")


# Open.


def _announce(core: Core, record: EpochRecord) -> None:
    """Announce the pending record, which is durable: it is valid from now on."""
    state, restore, seats = core.state, record.restore, SeatTable(record.seats)
    old_seats, drained, forgotten = state.seats, state.fleet.draining, state.blame.poisoned_from
    state.recoveries.spend("decide", core.now)
    if state.restarted:
        _report_restart(core, restore)
    memory, fleet, lineage = state.memory, state.fleet, state.lineage
    if restore.kind == "memory":
        # The inventories, dropped below, contain the layouts that members have yet to report.
        layouts = memory.in_slots(seats)
        memory.layouts |= layouts
        memory.inherited |= layouts.keys()
    else:
        memory.inherited = frozenset()
    memory.at_close, memory.at_join = {}, {}
    state.record, state.seats, state.restarted, state.grows = record, seats, False, False
    limit = core.now + opening_seconds(core, record)
    recovery = state.recoveries.current
    state.phase_state = states.Opening(limit, since=core.now if recovery else state.began)
    if state.is_changing:  # iterations that are computed again give other numbers
        first = restore.generation.iteration + 1
        forgotten = first if forgotten is None else min(first, forgotten)
    if fleet.drains.isdisjoint(seats.nodes):
        fleet.drains = frozenset()
    fleet.deprioritized |= drained
    fleet.draining = fleet.returning = frozenset()
    lineage.kept = record.history.kept
    # Drop the checkpoints of discarded iterations now. Once these iterations are computed again,
    # old and new checkpoints cannot be distinguished.
    lineage.valid = state.blame.trusted(lineage.valid)
    state.blame.poisoned_from = None
    core.act(Announce(record, forgotten))
    core.emit(
        Kind.EPOCH_DECIDED,
        generation=restore.generation.to_list(),
        restore=restore.kind,
        segment=restore.boundary,
        changes=sorted(role for role, seat in record.seats.items() if old_seats.get(role) != seat),
        seconds=recovery.phases["decide"] if recovery else 0.0,
        **({} if len(old_seats) == len(seats) else {"roles": len(seats)}),
        **({} if forgotten is None else {"forgotten_from": forgotten}),
    )
    for place, member in sorted(fleet.members.items()):
        if place in seats.role_by_place:
            continue
        if place[0] in drained or len(old_seats) != len(seats):
            # The next process there serves as a fresh spare, built for the present size.
            core.kill(place)
        elif member.status in states.BUILDING:
            core.set_member(place, member.status)  # restarts its time limit


def _report_restart(core: Core, restore: Restore) -> None:
    """Report the state from which new processes continue, and the reason for that choice."""
    generation = restore.generation
    if restore.kind == "memory":
        nodes = sorted({s.node for p in restore.sources.values() for f in p.values() for s in f})
        base = f"generation {generation.lineage}:{generation.iteration} in memory of nodes {nodes}"
        reason = "the newest that every role can be given"
    else:
        query = replace(shutdown.restore_query(core, core.state.seats), durable=None, start=None)
        answer = planner.choose_restore(query)
        where = f"{restore.kind} state {restore.path}".rstrip()
        base = f"{where}, iteration {generation.iteration}"
        reason = answer.reason if isinstance(answer, NoRestore) else "memory has nothing newer"
    core.log("notice", f"restarted: continues from {base}: {reason}")


def opening_seconds(core: Core, record: EpochRecord) -> float:
    """Return the seconds in which every role has to restore the state of the record."""
    settings, members = core.settings, core.state.fleet.members
    limit = settings.adopt_seconds + settings.rebuild_seconds + settings.restore_seconds
    seated = {(seat.node, seat.local_rank) for seat in record.seats.values()}
    is_cold = any(members[p].status is not states.MemberStatus.WARM for p in seated if p in members)
    if is_cold or core.state.is_changing:
        limit += settings.start_seconds
    if record.restore.kind != "memory":  # index files are made, or a load takes long
        limit += settings.first_step_seconds
    return limit


def restored(core: Core, event: ev.Restored) -> None:
    """Note that a role has its state; with the last role the epoch opens."""
    role, record, phase_state = core.sender_role(event), core.state.record, core.state.phase_state
    if role is None or record is None:
        return
    if record.restore.kind == "initial" and isinstance(phase_state, states.Entering):
        if not _adopt_start(core, phase_state, event.generation, record):
            return
    elif event.generation != record.restore.generation:
        text = f"role {role} restored {event.generation} instead of {record.restore.generation}"
        kind, signature = FailureKind.CORRUPT_STATE, ("restore", "generation")
        failure = Failure(text, kind, signature, node=event.node)
        has_failed = not core.state.is_changing
        core.state.blame.suspect(Suspicion(failure, core.now, restore_failed=has_failed))
        return
    if isinstance(phase_state, states.Entering):
        phase_state.restored.add(role)
        check_opened(core)


def _adopt_start(
    core: Core, phase_state: states.Entering, generation: Generation, record: EpochRecord
) -> bool:
    """Adopt the generation with which a role begins: on an initial start the program may have
    loaded a checkpoint of its own. If another role has loaded another checkpoint, end the run and
    return False."""
    begins = phase_state.begins or generation
    if generation != begins:
        loaded = f"iterations {begins.iteration} and {generation.iteration}"
        reason = f"roles loaded different checkpoints, of {loaded}: see what --load names"
        shutdown.finish(core, FinalStatus(1, reason))
        return False
    core.state.record = replace(record, restore=replace(record.restore, generation=begins))
    phase_state.begins = begins
    return True


def check_opened(core: Core) -> None:
    """Let the epoch run when every role has restored."""
    state, opening = core.state, core.state.phase_state
    if not isinstance(opening, states.Opening) or len(opening.restored) < len(state.seats):
        return
    recovery, members = state.recoveries.current, state.fleet.members
    for place in state.seats.role_by_place:
        core.set_member(place, states.MemberStatus.WARM)
    if opening.since is not None and (state.is_changing or not state.changes.wait_seconds):
        elasticity.note_opened(core, core.now - opening.since)
    state.phase_state = states.Running(opening.done, opening.pause)
    state.lineage.ever_ran = True
    state.recoveries.open(core.now)
    if state.record is not None and state.record.restore.kind == "initial":
        # The data is ready, so spares can begin to build: restart their time limits.
        for place in state.fleet.places_with(*states.BUILDING):
            core.set_member(place, members[place].status)
    spares = sorted(state.fleet.nodes.keys() - state.seats.nodes)
    phases = recovery.all_phases() if recovery else {}
    core.emit(Kind.EPOCH_OPENED, phases=phases, spares=spares)
    report_plan(core)
    check_done(core)


def check_done(core: Core) -> None:
    """End the run when every role has completed its last iteration. If the program could not save
    its state, have the vaults dump it."""
    roles = len(core.state.seats)
    match core.state.phase_state:
        case states.Running(done=done) | states.Pausing(done=done) if len(done) >= roles:
            early, unsaved = core.state.early, core.state.unsaved
            reason = f"ended early at {early}" if early else "training is complete"
            if unsaved:
                reason += f", its checkpoint was not written: {unsaved}"
                save_and_end(core, FinalStatus(ExitStatus.SAVED, reason), FailureKind.PLANNED)
            elif early:
                shutdown.finish(core, FinalStatus(ExitStatus.SAVED, reason), is_early=True)
            else:
                shutdown.finish(core, FinalStatus(0, ""))


# Reports on the epoch.


def step_reported(core: Core, event: ev.StepReported | ev.NotFinite) -> None:
    """Note that a role has completed an iteration; the first new iteration ends a recovery."""
    state, iteration = core.state, event.iteration
    if state.record is None or event.epoch != state.reporting_epoch:
        core.refuse(f"step {iteration}", **core.not_open(event.epoch))
        return
    state.lineage.report(Generation(event.epoch, iteration))
    is_recovering = state.recoveries.current is not None
    is_new = iteration > state.record.restore.generation.iteration
    if is_recovering and is_new and isinstance(state.phase_state, states.Running | states.Pausing):
        shutdown.end_recovery(core)
    if is_new and state.is_changing:
        elasticity.note_trained(core, state.record)


def phase_reported(core: Core, event: ev.PhaseReported) -> None:
    """Note the time that a member or vault spent in a phase of a recovery. A report that arrives
    after its epoch was closed is not counted for a later epoch."""
    reporting = core.state.reporting_epoch or -1
    core.state.recoveries.report(event.epoch, event.phase, event.seconds, event.exposed, reporting)
