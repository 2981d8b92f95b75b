"""How the run ends: the dump when no spare is left, the result, the leave-taking of the agents.

Pure functions on a Turn; each sets the phase together with its deadline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine.actions import Dump, Exit, ExportDump, Finish
from deadpool_megatron.cluster.machine.epoch.recovering import end_recovery
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet, without
from deadpool_megatron.cluster.machine.state.phases import DumpOrder, LastWords, Phase
from deadpool_megatron.cluster.machine.state.state import poisoned_generations
from deadpool_megatron.cluster.machine.turn import Turn, restore_query
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.decision import NoRestore, is_kept
from deadpool_megatron.layout.records import Generation, Restore

EXIT_SAVED = 75
EXIT_STOPPED = 130


def dump(turn: Turn) -> None:
    """Write the newest common generation (what is left of it) to disk, then end as the last words
    say; where there are none yet, because no spare came.
    """
    state = turn.state
    if state.dump is not None and state.dump.held:
        left = PersistentSet(n for n in state.dump.awaited if n in state.nodes)
        turn.set(dump=replace(state.dump, awaited=left))
        check_dumped(turn)
        return
    words = state.last_words or _no_spare(turn)
    turn.set(last_words=words)
    restore = turn.planner.choose_restore(restore_query(turn, state.seats))
    if isinstance(restore, NoRestore):
        status = 1 if words.status == EXIT_SAVED else words.status
        reason = f"{words.reason}; {restore.reason}"
        dump_held(turn, replace(words, status=status, reason=reason))
    elif restore.kind == "initial":
        why = "nothing was saved" if _failed(turn) else "nothing was computed yet"
        _finish_with_slots(turn, replace(words, reason=f"{words.reason}; {why}"), restore)
    elif restore.kind != "memory":
        reason = f"{words.reason}; the newest checkpoint is {restore.path}"
        dump_held(turn, replace(words, reason=reason), restore)
    else:
        _dump_generation(turn, restore)


def cannot_decide(turn: Turn, why: str) -> None:
    """No epoch can follow; to save what there is does not need one."""
    if turn.state.last_words is None:
        turn.set(last_words=LastWords(1, why))
    dump(turn)


def end_as_found(turn: Turn, words: LastWords) -> None:
    """The program does not come up. What an earlier start has left in memory stays."""
    turn.set(last_words=words)
    if turn.state.record is None:
        dump(turn)  # nothing was begun
        return
    run = PurePath(turn.config.dump_directory).parent
    reason = (
        f"{words.reason}; what the run holds in memory stays: the command that it had, with"
        f" --run-dir {run}, goes on from it, 'deadpool clean {run}' removes it"
    )
    finish(turn, words.status, reason, kind=words.kind, keeps_slots=True)


def _no_spare(turn: Turn) -> LastWords:
    waited = f"no spare node for {turn.config.settings.spare_timeout_seconds:g} s"
    return LastWords(EXIT_SAVED, waited, exports=True)


def _dump_generation(turn: Turn, restore: Restore) -> None:
    state, g = turn.state, restore.generation
    directory = f"{turn.config.dump_directory}/{g.lineage}-{g.iteration}"
    saved = replace(restore, kind="dump", path=directory, sources={}, recipes={})
    order = state.dump
    if order is not None and order.restore == saved:
        turn.set(
            dump=replace(order, awaited=PersistentSet(n for n in order.awaited if n in state.nodes))
        )
    else:
        nodes = PersistentSet(node for node in state.inventories if node in state.nodes)
        turn.set(
            phase=Phase.DUMPING,
            deadline=turn.now + turn.config.settings.first_step_seconds,
            dump=DumpOrder(saved, nodes, chains=_chains(restore), failed=_failed(turn)),
        )
        turn.act(Dump(tuple(sorted(nodes)), directory, g, restore.boundary))
    check_dumped(turn)


def dump_held(turn: Turn, words: LastWords, resume: Restore | None = None) -> None:
    """Memory cannot give a generation to every role: before the run ends the nodes that are left
    write all they hold, for a later run that finds the rest (FFTrainer's lazy dump)."""
    state = turn.state
    nodes = [n for n, found in sorted(state.held.items()) if n in state.nodes and found.holdings]
    generations = _generations_held(turn, nodes)
    if not generations:
        _finish_with_slots(turn, words, resume)
        return
    directory = turn.config.dump_directory
    turn.set(
        phase=Phase.DUMPING,
        deadline=turn.now + turn.config.settings.first_step_seconds,
        last_words=words,
        dump=DumpOrder(
            Restore("dump", generations[0], path=directory),
            PersistentSet(nodes),
            held=True,
            resume=resume,
            failed=_failed(turn),
        ),
    )
    turn.act(Dump(tuple(nodes), directory, generations[0], "", generations))
    check_dumped(turn)


def dump_failed(turn: Turn, node: int, why: str) -> None:
    """A node cannot write, or not in time: go on with what the others have."""
    order = turn.state.dump
    if order is None or turn.state.phase is not Phase.DUMPING:
        return
    failed, awaited = order.failed | {node}, order.awaited.without(node)
    turn.set(dump=replace(order, awaited=awaited, failed=failed))
    if order.held:
        text = f"node {node} could not write all it holds: {why}"
        turn.emit(Kind.LOG, node=node, level="error", text=text)
        check_dumped(turn)
        return
    state = turn.state
    turn.set(inventories=without(state.inventories, node), found=without(state.found, node))
    turn.emit(Kind.LOG, node=node, level="error", text=f"node {node} cannot dump: {why}")
    dump(turn)


def _failed(turn: Turn) -> frozenset[int]:
    return turn.state.dump.failed if turn.state.dump is not None else frozenset()


def _finish_with_slots(turn: Turn, words: LastWords, resume: Restore | None) -> None:
    """End the run; what a node could not write stays in memory, where there is nothing else."""
    failed, reason = sorted(_failed(turn)), words.reason
    if failed:
        run = PurePath(turn.config.dump_directory).parent
        reason += (
            f"; nodes {failed} could not write what they hold, it stays in memory there: make room,"
            f" then 'deadpool run --resume {run} --run-dir NEW' on their hosts writes it first"
        )
    finish(turn, words.status, reason, resume, words.kind, keeps_slots=bool(failed))


def _generations_held(turn: Turn, nodes: Iterable[int]) -> tuple[Generation, ...]:
    """Those on the kept line that may be restored, the newest first."""
    state = turn.state
    held = {h.generation for node in nodes for h in state.held[node].holdings}
    bad = state.bad_generations | poisoned_generations(state)
    return tuple(sorted((g for g in held - bad if is_kept(state.kept, g)), reverse=True))


def _chains(restore: Restore) -> frozenset[Generation]:
    """Generations whose parts are written as well, because roles recompute from them."""
    replays = (recipe.replay for recipe in restore.recipes.values())
    return frozenset(one for replay in replays if replay is not None for one in replay.sources)


def check_dumped(turn: Turn) -> None:
    """End the run when every node has written its part."""
    order = turn.state.dump
    if turn.state.phase is not Phase.DUMPING or order is None or order.awaited:
        return
    if order.held:
        _finish_held(turn, order)
        return
    if order.exporting:
        return  # its end is awaited
    turn.emit(Kind.DUMPED, path=order.restore.path, generation=order.restore.generation.to_list())
    # Before a time limit the run has exported what could be done in time, while it trained.
    writers, words = _writers(turn, order), _words(turn)
    if turn.config.settings.exports and words.exports and writers:
        limit = turn.config.settings.persist_seconds + turn.config.settings.close_seconds
        turn.set(deadline=turn.now + limit, dump=replace(order, exporting=True))
        turn.act(ExportDump(order.restore, writers))
    else:
        _finish_dumped(turn, order, "")


def _writers(turn: Turn, order: DumpOrder) -> dict[int, int]:
    """Role -> the node that makes its part of a checkpoint: its own, those of lost ones by turns.

    What a node has dumped is on a disk that all of them share. Empty when no node is left.
    """
    seated = {role: seat.node for role, seat in turn.state.seats.items()}
    nodes = sorted(node for node in order.finished if node in turn.state.nodes)
    if not nodes:
        return {}
    return {
        role: node if node in nodes else nodes[role % len(nodes)]
        for role, node in sorted(seated.items())
    }


def dump_exported(turn: Turn, generation: Generation, path: str) -> None:
    """What was dumped is a checkpoint at ``path``, too, or could not become one (empty): end."""
    order = turn.state.dump
    wanted = turn.state.phase is Phase.DUMPING and order is not None and order.exporting
    if wanted and order is not None and generation == order.restore.generation:
        _finish_dumped(turn, order, path)


def hurry(turn: Turn, reason: str) -> None:
    """Who asks has no time to lose: the run ends as soon as the state is on the disk."""
    order = turn.state.dump
    if order is not None and order.exporting:
        dump_exported(turn, order.restore.generation, "")
    elif (words := _words(turn)).exports:
        turn.set(last_words=replace(words, reason=f"{words.reason}; {reason}", exports=False))


def stop(turn: Turn, reason: str) -> None:
    """The user ends the run (130). One that is dumped ends as that, without the checkpoint: what it
    goes on from must be told in any case; one that is being saved keeps its memory."""
    order = turn.state.dump
    if order is not None and order.exporting:
        dump_exported(turn, order.restore.generation, "")
    if turn.state.phase is Phase.DUMPING:
        run = PurePath(turn.config.dump_directory).parent
        reason += (
            f" before all was written ({_words(turn).reason}): the state stays in memory, 'deadpool"
            f" run --resume {run} --run-dir NEW' goes on from it, 'deadpool clean {run}' removes it"
        )
    finish(turn, EXIT_STOPPED, reason, keeps_slots=turn.state.phase is Phase.DUMPING)


def _finish_dumped(turn: Turn, order: DumpOrder, checkpoint: str) -> None:
    run, words = PurePath(order.restore.path).parent.parent, _words(turn)
    reason = (
        f"{words.reason}; state dumped to {order.restore.path}:"
        f" continue with 'deadpool run --resume {run} --run-dir NEW' and the same other arguments"
    )
    if checkpoint:
        reason += f"; the same state is a checkpoint for Megatron's --load in {checkpoint}"
    finish(turn, words.status, reason, order.restore, words.kind)


def _words(turn: Turn) -> LastWords:
    assert turn.state.last_words is not None, "set before anything is dumped"
    return turn.state.last_words


def _finish_held(turn: Turn, order: DumpOrder) -> None:
    words, run = _words(turn), PurePath(order.restore.path).parent
    if order.finished:
        generation = order.restore.generation.to_list()
        turn.emit(Kind.DUMPED, path=order.restore.path, generation=generation)
        written = f"nodes {sorted(order.finished)} wrote what they held to {order.restore.path}"
        words = replace(
            words,
            reason=f"{words.reason}; {written}: 'deadpool run --resume {run} --run-dir NEW' goes on"
            " from the newest generation that is whole with what other hosts still have in memory",
        )
    _finish_with_slots(turn, words, order.resume)


def finish(
    turn: Turn,
    status: int,
    reason: str,
    resume: Restore | None = None,
    kind: FailureKind | None = None,
    *,
    keeps_slots: bool = False,
) -> None:
    """End the run; the agents get ``close_seconds`` to go. ``keeps_slots``: what is in memory stays
    there, for a start with the same run directory."""
    if turn.state.phase in (Phase.ENDING, Phase.ENDED):
        return
    end_recovery(turn)
    turn.set(
        phase=Phase.ENDING,
        deadline=turn.now + turn.config.settings.close_seconds,
        exit_status=status,
        suspicion=None,
    )
    named = str(kind or "")
    turn.act(Finish(status, reason, resume, named, keeps_slots))
    turn.emit(Kind.RUN_ENDED, exit_status=status, reason=reason, kind=named)
    check_ended(turn)


def check_ended(turn: Turn, *, overdue: bool = False) -> None:
    """Exit when all agents have gone."""
    if turn.state.phase is Phase.ENDING and (overdue or not turn.state.nodes):
        assert turn.state.exit_status is not None
        turn.set(phase=Phase.ENDED, deadline=None)
        turn.act(Exit(turn.state.exit_status))


def check_done(turn: Turn) -> None:
    """End the run well when every role has completed its last iteration."""
    running = turn.state.phase in (Phase.RUNNING, Phase.PAUSING)
    if running and len(turn.state.done) == turn.config.world_size:
        finish(turn, 0, "")
