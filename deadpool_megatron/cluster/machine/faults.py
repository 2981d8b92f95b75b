"""Faults that roles report, or that are observed: hangs, broken communication, state that does not
restore, wrong numbers, numbers that are not finite."""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.cluster.machine import inputs as ev, membership
from deadpool_megatron.cluster.machine.actions import EmitEvent
from deadpool_megatron.cluster.machine.blame import SHOWN_FAILURES, Failure, FinalStatus, Suspicion
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.cluster.machine.epoch import close, save_and_end, step_reported
from deadpool_megatron.cluster.machine.shutdown import abort_start
from deadpool_megatron.cluster.machine.state import LAST_PHASES, State
from deadpool_megatron.events import Kind
from deadpool_megatron.failures import GRACE_SECONDS, ExitStatus, FailureKind
from deadpool_megatron.layout.records import BadPart, Generation
from deadpool_megatron.layout.shard_map import part_of


def roles_hung(core: Core, event: ev.RolesHung) -> None:
    """Replace the processes of the roles that block all others, as no role makes progress."""
    if event.epoch != core.state.open_epoch:
        core.refuse("hang verdict", **core.not_open(event.epoch))
        return
    core.emit(Kind.HANG, roles=list(event.roles), **event.table)
    _close_for(core, event.roles, event.cause, "hang", event.still_seconds)


def not_restored(core: Core, roles: tuple[int, ...]) -> None:
    """Replace the processes of these roles, for which the epoch could not open in time."""
    _close_for(core, roles, f"roles {list(roles)} did not restore in time", "opening")


def _close_for(
    core: Core, roles: tuple[int, ...], cause: str, name: str, still_seconds: float = 0.0
) -> None:
    seats = core.state.seats
    for role in roles:
        core.kill((seats[role].node, seats[role].local_rank), hung=True)
    first = seats[roles[0]].node if roles else None
    failure = Failure(cause, FailureKind.HANG, (name, *map(str, roles)), node=first)
    close(core, failure, silent_seconds=still_seconds)


def fault_reported(core: Core, event: ev.MemberFault) -> None:
    """Note that communication has failed in a role."""
    if (role := core.sender_role(event)) is not None:
        text, kind = f"role {role}: {event.text}", FailureKind.COMMUNICATOR_ERROR
        failure = Failure(text, kind, ("fault",), node=event.node)
        core.state.blame.suspect(Suspicion(failure, core.now))


def raised(core: Core, event: ev.MemberRaised) -> None:
    """Note that a role has raised an exception. Unless a better cause arrives, its process ends,
    mostly before the grace period is over. The recovery's time counts from this report."""
    if (role := core.sender_role(event)) is not None:
        end = ev.MemberLost(*event.place, event.incarnation, 1, last_line=event.text)
        failure = membership.failure_of(end, f"{event.process} raised {event.text}", role)
        grace_seconds = 2 * GRACE_SECONDS
        core.state.blame.suspect(Suspicion(failure, core.now, grace_seconds=grace_seconds))


def believe(core: Core) -> None:
    """Act on a suspicion if no better cause arrived in time."""
    state = core.state
    suspicion, record = state.blame.suspicion, state.record
    if suspicion is None or core.now < suspicion.until or record is None:
        return
    path = record.restore.path
    state.blame.believe(suspicion, record.restore)
    if suspicion.restore_failed and path:
        state.lineage.invalidation_reason = suspicion.failure.cause
        if state.lineage.invalidate(path):  # the next restore uses the next older checkpoint
            text = f"checkpoint {path} is not used any more: {suspicion.failure.cause}"
            core.log("warning", text)
    close(core, suspicion.failure)


def restore_failed(core: Core, event: ev.NotRestored) -> None:
    """Note that no place had good bytes of a part. The next restore avoids the places that were
    tried."""
    role, record = core.sender_role(event), core.state.record
    if role is None or record is None:
        return
    if event.other_program and record.begins:
        final = FinalStatus(ExitStatus.BAD_INPUT, event.text, FailureKind.OTHER_PROGRAM)
        abort_start(core, final)
        return
    restore, generation = record.restore, record.restore.generation
    owner, part = part_of(event.part, role)  # a role of another size, or its own
    tried_sources = [*restore.sources.get(owner, {}).get(part, ())]
    recipe = restore.recipes.get(owner)
    decoding = recipe.decodings.get(part) if recipe is not None else None
    if decoding is not None:
        # Every decoding needs a parity block, so all parity blocks count as tried. The data blocks
        # are not suspected: a node whose data is damaged has found that out itself.
        for number, places in decoding.blocks.items():
            if number >= len(decoding.group):
                tried_sources += places
    bad = frozenset(BadPart(source.node, source.role, generation, part) for source in tried_sources)
    # Each part has its own signature, as falling back to the next source or generation counts as
    # progress. A failure of the whole state has the same signature, whichever role reports it.
    whole_state = str(generation) if restore.kind == "memory" else restore.path or restore.kind
    subject = (event.part, str(role), str(generation)) if bad else (whole_state,)
    cause = f"role {role} cannot be restored: {event.text}"
    failure = Failure(cause, FailureKind.CORRUPT_STATE, ("restore", *subject), node=event.node)
    has_failed = not bad and not core.state.is_changing
    core.state.blame.suspect(Suspicion(failure, core.now, bad, has_failed))


def size_failed(core: Core, event: ev.SizeFailed) -> None:
    """Note that a role cannot train at this size; nothing else is wrong with it."""
    if (role := core.sender_role(event)) is not None:
        kind, signature = FailureKind.CORRUPT_STATE, ("size", str(len(core.state.seats)))
        failure = Failure(f"role {role}: {event.text}", kind, signature, node=event.node)
        core.state.blame.suspect(Suspicion(failure, core.now))


def audit_failed(core: Core, event: ev.AuditFailed) -> None:
    """Quarantine the nodes that computed or held wrong numbers. A node that no spare can replace is
    given up, and its roles wait for a spare. If it is unknown which of the differing peers is
    wrong, end the run: to continue with either might be to train on wrong numbers."""
    role, state = core.sender_role(event), core.state
    if role is None or not event.roles or not all(peer in state.seats for peer in event.roles):
        return
    nodes = sorted({state.seats[peer].node for peer in event.roles})
    names = " and ".join(f"node {node}" for node in nodes)
    facts = {"roles": list(event.roles), "certain": event.certain, "what": event.subject}
    place = event.epoch, event.node, role, event.iteration
    core.act(EmitEvent(Kind.AUDIT_FAILED, *place, facts))
    cause = f"{event.subject} in iteration {event.iteration}: {names}"
    if not event.certain and len(nodes) > 1:
        text = f"{cause} differ; the wrong one is unknown: continue without one, then the other"
        final = FinalStatus(ExitStatus.DIVERGENCE, text, FailureKind.SILENT_CORRUPTION)
        save_and_end(core, final, FailureKind.SILENT_CORRUPTION)
        return
    kind, signature = FailureKind.SILENT_CORRUPTION, ("audit", *map(str, event.roles))
    failure = Failure(f"{cause} computed or held wrong numbers", kind, signature, node=nodes[0])
    without_spare = []
    for node in nodes:
        if not membership.move_to_spare(core, node, f"as {failure.cause}", kind):
            without_spare.append(node)
        membership.quarantine(core, node, failure.cause)
    for node in without_spare:
        membership.drop_node(core, node, replace(failure, node=node))
    close(core, failure)


def note_stack(core: Core, event: ev.StackReported) -> None:
    """Add the position of a process that hung."""
    blame = core.state.blame
    blame.stacks = (*blame.stacks, event.text)[-SHOWN_FAILURES:]


def diverged(core: Core, event: ev.Diverged) -> None:
    """End the run: training has no unique result, and the state on disk from which the epoch
    began is suspect."""
    state, text = core.state, event.text
    if state.record is not None and (path := state.record.restore.path):
        k = state.record.restore.generation.iteration
        older = (each.path for each in state.lineage.valid if each.generation.iteration < k)
        previous = next(older, "there is none")
        text += f"; this state is suspect, it came from {path} (the one before: {previous})"
    save_and_end(core, FinalStatus(ExitStatus.DIVERGENCE, text))


def not_finite(core: Core, event: ev.NotFinite) -> None:
    """Act on a non-finite number as the setting ``nonfinite`` asks: ignore, stop or rollback.

    The epoch may have been closed for another reason in the meantime; its generations still count.
    """
    state, blame, k = core.state, core.state.blame, event.iteration
    setting, generation = core.settings.nonfinite, Generation(event.epoch, event.iteration)
    if setting == "ignore":
        step_reported(core, event)
        return
    if blame.is_poisoned(generation):
        return  # another role has reported it, or it follows from that report
    # Nothing computes iteration 0: it is the state as built or loaded.
    if k < 1 or state.phase in LAST_PHASES or not state.lineage.keeps(generation):
        reason = f"nothing continues from it in epoch {event.epoch}"
        core.refuse(f"{event.number} of step {k}", reason)
        return
    is_repeated = k in blame.nonfinite
    # If it repeats, it is no stray fault of this iteration: the state before it may be bad.
    first_bad = _origin(state) if is_repeated else k
    policy = "stop" if first_bad is None or setting != "rollback" else "rollback"
    facts = {"number": event.number, "value": event.value, "policy": policy}
    core.act(EmitEvent(Kind.NONFINITE, event.epoch, event.node, event.role, k, facts))
    finding = f"the {event.number} of iteration {k} is {event.value}"
    cause = f"{finding} (seen by role {event.role}; it may come from any of its peers)"
    if is_repeated:
        cause += ", and was not finite either when it was computed before"
    if first_bad is None or policy == "stop":
        # The state to save is the state before the iteration.
        blame.poisoned_from = k
        save_and_end(core, FinalStatus(ExitStatus.NONFINITE, cause, FailureKind.NONFINITE_LOSS))
        return
    blame.discard(k, state.epoch)
    blame.discard(first_bad, state.epoch)
    signature = ("nonfinite", str(k), str(first_bad))
    close(core, Failure(cause, FailureKind.NONFINITE_LOSS, signature, node=event.node))


def _origin(state: State) -> int | None:
    """Return the iteration of the generation from which this epoch began. Return None if there is
    no older state to fall back to, and for a checkpoint, which was checked when it was written."""
    record = state.record
    if record is None or record.restore.kind not in ("memory", "dump"):
        return None
    k = record.restore.generation.iteration
    return k if any(restore.generation.iteration < k for restore in state.lineage.valid) else None
