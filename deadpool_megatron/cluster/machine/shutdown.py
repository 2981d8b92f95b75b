"""The end of a run: the dump when no spare is left, the result, the departure of the agents.

A checkpoint is inspected before a run ends with it or continues from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath

from deadpool_megatron.cluster.machine import actions, inputs as ev, state as states
from deadpool_megatron.cluster.machine.blame import FinalStatus
from deadpool_megatron.cluster.machine.core import Core
from deadpool_megatron.events import Kind
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.layout import planner
from deadpool_megatron.layout.planner import NoRestore, RestoreQuery
from deadpool_megatron.layout.records import Generation, Restore, Seat


def restore_query(core: Core, seats: Mapping[int, Seat]) -> RestoreQuery:
    """Return the query for the state from which the next epoch can be restored at the same size."""
    state, start, inventories = core.state, core.config.start, core.state.memory.inventories
    # After a takeover, only memory shows what the first epoch has computed.
    begins = not (state.lineage.ever_ran or state.lineage.newest or state.memory.has_computed)
    begins = begins or (core.config.from_scratch and state.restarted)
    return RestoreQuery(
        epoch=state.epoch + 1,
        roles=state.seats,
        inventories=inventories,
        seats=seats,
        owners=state.seats,
        kept=state.lineage.kept,
        layouts=state.memory.layouts,
        bad_parts=state.blame.bad_parts,
        bad_generations=state.blame.untrusted(inventories.values()),
        durable=next(iter(state.blame.trusted(state.lineage.valid)), None),
        start=start if start.kind == "initial" and begins else None,
        every=1 if state.record is None else state.record.protection.every,
        sizes=state.memory.sizes if core.settings.elastic != "off" else None,
    )


def roles_of(core: Core, count: int) -> range:
    """Return the roles of a run of ``count`` roles."""
    sizes, first = core.state.memory.sizes, core.settings.first_role
    return range(first, first + count) if sizes is None else sizes.roles(count, first)


# Checkpoints.


def must_inspect(core: Core) -> bool:
    """Return whether the checkpoints have yet to be inspected after the close; if so, order that.
    Until then no epoch is decided, and the run does not end."""
    lineage, phase_state = core.state.lineage, core.state.phase_state
    if lineage.is_inspected or not lineage.valid:
        return False
    if not (isinstance(phase_state, states.Closing) and phase_state.inspects):
        deadline = core.now + core.settings.gather_seconds
        core.state.phase_state = states.Closing(deadline, inspects=True)
        core.act(actions.InspectCheckpoints(lineage.valid))
    return True


def durable_valid(core: Core, event: ev.DurableValid) -> None:
    """Note a checkpoint that became valid."""
    generation = Generation(0, event.iteration)
    where = (event.boundary, event.path)
    core.state.lineage.add_valid(Restore("durable", generation, *where, identity=event.identity))


def with_unloadable(core: Core, reason: str) -> str:
    """Return the reason with the checkpoints that could not be loaded, if there are any."""
    paths, cause = sorted(core.state.lineage.invalidated), core.state.lineage.invalidation_reason
    last = f"; at the last try {cause}" if cause else ""
    return f"{reason}; could not be loaded: {', '.join(paths)}{last}" if paths else reason


# The dump.


def dump(core: Core) -> None:
    """Write the newest common generation (or the part of it that is missing) to disk, then end with
    ``state.final``, or for lack of a spare if that is not set."""
    state, dumping = core.state, core.state.phase_state
    if isinstance(dumping, states.Dumping) and dumping.writes_all:
        _forget_lost(core, dumping)
        return
    waited = f"no spare node for {core.settings.spare_timeout_seconds:g} s"
    final = state.final or FinalStatus(ExitStatus.SAVED, waited, exports=True)
    if isinstance(dumping, states.Dumping):
        final = dumping.final
    elif must_inspect(core):
        state.final = final
        return
    query = restore_query(core, state.seats)
    restore = planner.choose_restore(query)
    if state.is_changing and (isinstance(restore, NoRestore) or restore.kind != "memory"):
        # The generation of the previous size is perhaps still whole.
        older = planner.choose_restore(replace(query, roles=roles_of(core, state.changes.trained)))
        restore = older if isinstance(older, Restore) else restore
    if isinstance(restore, NoRestore):
        status = 1 if final.status == ExitStatus.SAVED else final.status
        # If nodes could not write, that is the reason, and it is reported at the end.
        reason = (final if _write_errors(core) else final.with_detail(restore.reason)).reason
        dump_held(core, replace(final, status=status, reason=with_unloadable(core, reason)))
    elif restore.kind == "initial":
        detail = "nothing was saved" if _write_errors(core) else "nothing was computed yet"
        _finish_with_slots(core, final.with_detail(detail), restore)
    elif restore.kind != "memory":
        dump_held(core, final.with_detail(f"the newest checkpoint is {restore.path}"), restore)
    else:
        _dump_generation(core, final, restore)


def _forget_lost(core: Core, dumping: states.Dumping) -> None:
    """Stop waiting for lost nodes to write."""
    dumping.awaited &= core.state.fleet.nodes.keys()
    check_dumped(core)


def cannot_decide(core: Core, reason: str) -> None:
    """Save the state and end the run: no epoch can follow, and the save needs no epoch."""
    core.state.final = core.state.final or FinalStatus(1, reason)
    dump(core)


def abort_start(core: Core, final: FinalStatus) -> None:
    """End a start that has failed. State that an earlier start left in memory stays."""
    if core.state.record is None:
        core.state.final = final
        dump(core)  # there is no epoch yet
        return
    if not (core.config.restarted or core.config.finished or core.state.restarted):
        finish(core, final.with_detail("nothing was computed yet"))
        return
    finish(core, final, keeps_slots=True)


def _dump_generation(core: Core, final: FinalStatus, restore: Restore) -> None:
    state, g = core.state, restore.generation
    directory = f"{core.config.dump_directory}/{g.lineage}-{g.iteration}"
    saved = replace(restore, kind="dump", path=directory, sources={}, recipes={})
    if isinstance(state.phase_state, states.Dumping) and state.phase_state.restore == saved:
        # Every node writes all its parts of the generation anyway, whatever the restore needs.
        _forget_lost(core, state.phase_state)
        return
    nodes = state.memory.inventories.keys() & state.fleet.nodes.keys()
    deadline, failed = core.now + core.settings.first_step_seconds, _write_errors(core)
    roles = tuple(sorted(restore.sources))
    state.phase_state = states.Dumping(deadline, final, saved, nodes, failed=failed, roles=roles)
    core.act(actions.Dump(tuple(sorted(nodes)), directory, g, restore.boundary))
    check_dumped(core)


def dump_held(core: Core, final: FinalStatus, resume: Restore | None = None) -> None:
    """Write all generations of the remaining nodes before the run ends, because none can be given
    to every role. A later run may find the missing parts (FFTrainer's lazy dump)."""
    state = core.state
    inventories, live = state.memory.inventories, state.fleet.nodes
    nodes = [n for n, inventory in sorted(inventories.items()) if n in live and inventory.holdings]
    generations = _generations_held(state, nodes)
    if not generations:
        _finish_with_slots(core, final, resume)
        return
    directory, failed = core.config.dump_directory, _write_errors(core)
    newest = Restore("dump", generations[0], path=directory)
    deadline = core.now + core.settings.first_step_seconds
    state.phase_state = states.Dumping(
        deadline, final, newest, set(nodes), writes_all=True, resume=resume, failed=failed
    )
    core.act(actions.Dump(tuple(nodes), directory, generations[0], "", generations))
    check_dumped(core)


def note_dumped(core: Core, event: ev.Dumped) -> None:
    """Note that a node wrote its part to disk, or could not."""
    dumping = core.state.phase_state
    if (
        not isinstance(dumping, states.Dumping)
        or event.node not in dumping.awaited
        or event.generation != dumping.restore.generation
        or event.boundary not in ("", dumping.restore.boundary)
    ):
        core.refuse("dump", "not asked for", event.node)
    elif event.error:
        _dump_failed(core, dumping, event.node, event.error)
    else:
        dumping.awaited.discard(event.node)
        dumping.finished.add(event.node)
        dumping.damaged |= _note_damaged(core, event)
        if dumping.damaged and not dumping.awaited and not dumping.writes_all:
            # All nodes have reported their damaged parts, and can write another generation now.
            dump(core)
        else:
            check_dumped(core)


def _note_damaged(core: Core, event: ev.Dumped) -> bool:
    """Note damaged parts on which the planner relied; return whether any of them is new. Unlike a
    node that cannot write, this node stays a source for its other parts, which it has written."""
    blame = core.state.blame
    new = event.damaged - blame.bad_parts
    blame.bad_parts |= new
    for part in sorted(new):
        g = f"{part.generation.lineage}:{part.generation.iteration}"
        text = f"node {part.node} has part {part.part} of role {part.role} damaged, generation {g}"
        core.log("error", text, part.node)
    return bool(new)


def dump_overdue(core: Core, dumping: states.Dumping) -> None:
    """End the wait for nodes, or for the exporters after them."""
    if dumping.exporting:
        _finish_dumped(core, dumping)
        return
    for node in sorted(dumping.awaited):
        if isinstance(core.state.phase_state, states.Dumping):
            _dump_failed(core, core.state.phase_state, node, "not done in time")


def _dump_failed(core: Core, dumping: states.Dumping, node: int, error: str) -> None:
    """Continue without a node that cannot write, or has not written in time."""
    dumping.failed[node] = error
    dumping.awaited.discard(node)
    if dumping.writes_all:
        core.log("error", f"node {node} could not write all it holds: {error}", node)
        check_dumped(core)
        return
    core.state.memory.drop_node(node)
    core.log("error", f"node {node} cannot dump: {error}", node)
    dump(core)


def _write_errors(core: Core) -> dict[int, str]:
    """Return node -> error of the nodes that could not write."""
    dumping = core.state.phase_state
    return dumping.failed if isinstance(dumping, states.Dumping) else {}


def _generations_held(state: states.State, nodes: list[int]) -> tuple[Generation, ...]:
    """Return the generations of the kept lineages that may be restored, newest first."""
    inventories = [state.memory.inventories[node] for node in nodes]
    held = {holding.generation for inventory in inventories for holding in inventory.holdings}
    trusted = held - state.blame.untrusted(inventories)
    return tuple(sorted(filter(state.lineage.keeps, trusted), reverse=True))


def check_dumped(core: Core) -> None:
    """End the run when every node has written its part."""
    dumping = core.state.phase_state
    if not isinstance(dumping, states.Dumping) or dumping.awaited:
        return
    if dumping.writes_all:
        _finish_held(core, dumping)
        return
    if dumping.exporting:
        return  # the end of the export is awaited
    restore, settings = dumping.restore, core.settings
    core.emit(Kind.DUMPED, path=restore.path, generation=restore.generation.to_list())
    # A run with a time limit does not export now, as its last export came before the dump.
    writers, is_small = _writers(core, dumping), len(dumping.roles) < core.config.world_size
    if (settings.exports or is_small) and dumping.final.exports and writers:
        dumping.deadline = core.now + settings.persist_seconds + settings.close_seconds
        dumping.exporting = True
        core.act(actions.ExportDump(restore, writers))
    else:
        _finish_dumped(core, dumping)


def _writers(core: Core, dumping: states.Dumping) -> dict[int, int]:
    """Return role -> node that exports its part: the role's own node, or another if that is lost.

    The other nodes take turns, as all share the disk with the dump. Empty when no node is left.
    """
    nodes = sorted(dumping.finished & core.state.fleet.nodes.keys())
    if not nodes:
        return {}
    own = {role: seat.node for role, seat in core.state.seats.items() if seat.node in nodes}
    return {role: own.get(role, nodes[role % len(nodes)]) for role in dumping.roles}


def dump_exported(core: Core, event: ev.DumpExported) -> None:
    """End the run, as the export of the dumped state has ended, well or not."""
    match core.state.phase_state:
        case states.Dumping(exporting=True, restore=restore) as dumping:
            if event.generation == restore.generation:
                _finish_dumped(core, dumping, event.path)


# The end.


def expedite(core: Core, dumping: states.Dumping, reason: str) -> None:
    """End the run as soon as the state is on disk, without an export: there is no time left."""
    if dumping.exporting:
        _finish_dumped(core, dumping)
    elif dumping.final.exports:
        dumping.final = replace(dumping.final.with_detail(reason), exports=False)


def stop(core: Core, event: ev.UserStop) -> None:
    """End the run for the user (exit status 130). An export of a dump is cut short, but the dump is
    still reported as the state to continue from. During a dump the state in memory stays; otherwise
    it stays only if the user ``keeps`` it. A run that is ending ends its waits."""
    reason = event.reason
    match core.state.phase_state:
        case states.Dumping(exporting=True) as dumping:
            _finish_dumped(core, dumping)
        case states.Ending() | states.Ended():
            core.act(actions.ExpediteExit())
        case states.Dumping(final=final):
            reason += (
                f" before all was written ({final.reason}): the state stays in memory,"
                f" {_command(core)} continues from it, 'deadpool clean {_run(core)}' removes it"
            )
            finish(core, FinalStatus(ExitStatus.STOPPED, reason), keeps_slots=True)
        case _ if core.state.restarted and not core.state.survived:
            # The user has reconsidered this start, so the state from before it stays.
            abort_start(core, FinalStatus(ExitStatus.STOPPED, reason))
        case _:
            keeps = event.keeps and core.state.record is not None
            finish(core, FinalStatus(ExitStatus.STOPPED, reason), keeps_slots=keeps)


def _run(core: Core) -> PurePath:
    return PurePath(core.config.dump_directory).parent


def _command(core: Core) -> str:
    """Return the command that continues from the state of this run."""
    return f"'deadpool run --resume {_run(core)} --run-dir NEW'"


def _finish_dumped(core: Core, dumping: states.Dumping, checkpoint: str = "") -> None:
    final = dumping.final.with_detail(
        f"state dumped to {dumping.restore.path}:"
        f" continue with {_command(core)} and the same other arguments"
    )
    if checkpoint:
        detail = f"the same state is a checkpoint for Megatron's --load in {checkpoint}"
        final = final.with_detail(detail)
    finish(core, final, dumping.restore)


def _finish_held(core: Core, dumping: states.Dumping) -> None:
    final, restore = dumping.final, dumping.restore
    if dumping.finished:
        core.emit(Kind.DUMPED, path=restore.path, generation=restore.generation.to_list())
        final = final.with_detail(
            f"nodes {sorted(dumping.finished)} wrote what they held to {restore.path}:"
            f" {_command(core)} continues from the newest generation that is whole with the"
            " memory of other hosts"
        )
    _finish_with_slots(core, final, dumping.resume)


def _finish_with_slots(core: Core, final: FinalStatus, resume: Restore | None) -> None:
    """End the run; if a node could not write, the slots of all nodes stay in memory."""
    if errors := _write_errors(core):
        text = "; ".join(dict.fromkeys(errors.values()))
        final = final.with_detail(
            f"the dump of nodes {sorted(errors)} could not be written ({text}), the state stays"
            f" in their memory: make room, then {_command(core)} on their hosts writes it first"
        )
    finish(core, final, resume, keeps_slots=bool(errors))


def finish(
    core: Core,
    final: FinalStatus,
    resume: Restore | None = None,
    *,
    keeps_slots: bool = False,
    is_early: bool = False,
) -> None:
    """End the run with this status; the agents get ``close_seconds`` to leave. ``keeps_slots``:
    data in memory stays there, for a start with the same run directory. When the run is over and
    every requested save is valid, the coordinator emits RUN_ENDED."""
    state = core.state
    if isinstance(state.phase_state, states.Ending | states.Ended):
        return
    end_recovery(core)
    is_lost = resume is None and final.status not in (0, ExitStatus.SAVED)
    unsaved = final.reason if keeps_slots or is_lost else ""
    limit = core.now + core.settings.close_seconds
    state.phase_state = states.Ending(limit, final.status, unsaved)
    state.blame.suspicion = None
    kind = str(final.kind or "")
    core.act(actions.Finish(final.status, final.reason, resume, kind, keeps_slots, is_early))
    check_ended(core)


def end_recovery(core: Core) -> None:
    """Report the times of a recovery, as its first iteration is complete or the run ends before
    that."""
    state = core.state
    if state.record is None or not isinstance(state.phase_state, states.Open):
        return
    if (report := state.recoveries.finish(state.record, core.now)) is not None:
        core.emit(Kind.RECOVERED, **{k: v for k, v in report.to_dict().items() if k != "epoch"})


def check_ended(core: Core, *, overdue: bool = False) -> None:
    """Exit when all agents have left."""
    match core.state.phase_state:
        case states.Ending(status=status) if overdue or not core.state.fleet.nodes:
            core.state.phase_state = states.Ended()
            core.act(actions.Exit(status))
