"""The end of a run: the dump when no spare is left, the result, the leave-taking of the agents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.actions import Dump, Exit, ExportDump, Finish, Hurry
from deadpool_megatron.cluster.machine.epoch.looks import must_look, with_struck
from deadpool_megatron.cluster.machine.state.blame import LastWords
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet
from deadpool_megatron.cluster.machine.state.phases import Dumping, Ended, Ending
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.machine.turn import Turn
from deadpool_megatron.events import Kind
from deadpool_megatron.layout import planner
from deadpool_megatron.layout.planner import NoRestore
from deadpool_megatron.layout.records import Generation, Restore

EXIT_SAVED = 75
EXIT_STOPPED = 130


def dump(turn: Turn) -> None:
    """Write the newest common generation (what is left of it) to disk, then end as the last words
    say; where there are none yet, because no spare came.
    """
    state, dumping = turn.state, turn.state.doing
    if isinstance(dumping, Dumping) and dumping.held:
        _forget_lost(turn, dumping)
        return
    words = dumping.words if isinstance(dumping, Dumping) else state.last_words or _no_spare(turn)
    if not isinstance(dumping, Dumping) and must_look(turn):
        turn.state = turn.state._replace(last_words=words)
        return
    restore = planner.choose_restore(turn.restore_query(state.seats))
    if isinstance(restore, NoRestore):
        status = 1 if words.status == EXIT_SAVED else words.status
        reason = with_struck(turn, f"{words.reason}; {restore.reason}")
        dump_held(turn, replace(words, status=status, reason=reason))
    elif restore.kind == "initial":
        why = "nothing was saved" if _failed(turn) else "nothing was computed yet"
        _finish_with_slots(turn, replace(words, reason=f"{words.reason}; {why}"), restore)
    elif restore.kind != "memory":
        reason = f"{words.reason}; the newest checkpoint is {restore.path}"
        dump_held(turn, replace(words, reason=reason), restore)
    else:
        _dump_generation(turn, words, restore)


def _forget_lost(turn: Turn, dumping: Dumping) -> None:
    """Nobody waits for what lost nodes would have written."""
    left = PersistentSet(node for node in dumping.awaited if node in turn.state.fleet.nodes)
    turn.enter(replace(dumping, awaited=left))
    check_dumped(turn)


def cannot_decide(turn: Turn, why: str) -> None:
    """No epoch can follow; to save what there is does not need one."""
    words = turn.state.last_words or LastWords(1, why)
    turn.state = turn.state._replace(last_words=words)
    dump(turn)


def end_as_found(turn: Turn, words: LastWords) -> None:
    """Nothing has come of this start. What an earlier one has left in memory stays."""
    if turn.state.record is None:
        turn.state = turn.state._replace(last_words=words)
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


def _dump_generation(turn: Turn, words: LastWords, restore: Restore) -> None:
    state, g = turn.state, restore.generation
    directory = f"{turn.config.dump_directory}/{g.lineage}-{g.iteration}"
    saved = replace(restore, kind="dump", path=directory, sources={}, recipes={})
    if isinstance(state.doing, Dumping) and state.doing.restore == saved:
        # Every node writes all it holds of the generation, so also where other parts lead to it.
        chains = state.doing.chains | _chains(restore)
        _forget_lost(turn, replace(state.doing, chains=chains))
        return
    nodes = PersistentSet(node for node in state.memory.held if node in state.fleet.nodes)
    deadline = turn.now + turn.config.settings.first_step_seconds
    chains, failed = _chains(restore), _failed(turn)
    turn.enter(Dumping(deadline, words, saved, nodes, chains=chains, failed=failed))
    turn.act(Dump(tuple(sorted(nodes)), directory, g, restore.boundary))
    check_dumped(turn)


def dump_held(turn: Turn, words: LastWords, resume: Restore | None = None) -> None:
    """Memory cannot give a generation to every role: before the run ends the nodes that are left
    write all they hold, for a later run that finds the rest (FFTrainer's lazy dump)."""
    held, live = turn.state.memory.held, turn.state.fleet.nodes
    nodes = [node for node, found in sorted(held.items()) if node in live and found.holdings]
    generations = _generations_held(turn.state, nodes)
    if not generations:
        _finish_with_slots(turn, words, resume)
        return
    directory = turn.config.dump_directory
    turn.enter(
        Dumping(
            turn.now + turn.config.settings.first_step_seconds,
            words,
            Restore("dump", generations[0], path=directory),
            PersistentSet(nodes),
            held=True,
            resume=resume,
            failed=_failed(turn),
        )
    )
    turn.act(Dump(tuple(nodes), directory, generations[0], "", generations))
    check_dumped(turn)


def note_dumped(turn: Turn, event: ev.Dumped) -> None:
    """A node wrote its part to disk, or could not."""
    dumping = turn.state.doing
    if (
        not isinstance(dumping, Dumping)
        or event.node not in dumping.awaited
        or event.generation != dumping.restore.generation
        or event.boundary not in ("", dumping.restore.boundary)
    ):
        turn.refuse("dump", "not asked for", event.node)
    elif event.error:
        dump_failed(turn, dumping, event.node, event.error)
    else:
        awaited = dumping.awaited.without(event.node)
        finished = dumping.finished.with_item(event.node)
        is_damaged = _note_damaged(turn, event) or dumping.damaged
        turn.enter(replace(dumping, awaited=awaited, finished=finished, damaged=is_damaged))
        if is_damaged and not awaited and not dumping.held:
            # Every node has said what is damaged, and is free to write another generation.
            dump(turn)
        else:
            check_dumped(turn)


def _note_damaged(turn: Turn, event: ev.Dumped) -> bool:
    """Bytes that the planner has counted on are not what was sealed; False when that is known.
    The node has written all else, so unlike one that cannot write it is counted on for the rest."""
    blame = turn.state.blame
    new = event.damaged - blame.bad_parts
    if not new:
        return False
    turn.state = turn.state._replace(blame=blame.with_bad_parts(new))
    for one in sorted(new):
        g = f"{one.generation.lineage}:{one.generation.iteration}"
        text = f"node {one.node} has part {one.part} of role {one.role} damaged, generation {g}"
        turn.log("error", text, one.node)
    return True


def dump_overdue(turn: Turn, dumping: Dumping) -> None:
    """Nodes, or the exporters after them, had their time."""
    if dumping.exporting:
        _finish_dumped(turn, dumping, "")
        return
    for node in sorted(dumping.awaited):
        if isinstance(turn.state.doing, Dumping):
            dump_failed(turn, turn.state.doing, node, "not done in time")


def dump_failed(turn: Turn, dumping: Dumping, node: int, why: str) -> None:
    """A node cannot write, or not in time: continue with what the others have."""
    failed, awaited = dumping.failed | {node}, dumping.awaited.without(node)
    turn.enter(replace(dumping, awaited=awaited, failed=failed))
    if dumping.held:
        turn.log("error", f"node {node} could not write all it holds: {why}", node)
        check_dumped(turn)
        return
    turn.state = turn.state._replace(memory=turn.state.memory.without_node(node))
    turn.log("error", f"node {node} cannot dump: {why}", node)
    dump(turn)


def _failed(turn: Turn) -> frozenset[int]:
    return turn.state.doing.failed if isinstance(turn.state.doing, Dumping) else frozenset()


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


def _generations_held(state: State, nodes: list[int]) -> tuple[Generation, ...]:
    """Those on the kept line that may be restored, the newest first."""
    inventories = [state.memory.held[node] for node in nodes]
    held = {holding.generation for found in inventories for holding in found.holdings}
    trusted = held - state.blame.untrusted(inventories)
    return tuple(sorted(filter(state.line.keeps, trusted), reverse=True))


def _chains(restore: Restore) -> frozenset[Generation]:
    """Generations whose parts are written as well, because roles recompute from them."""
    replays = (recipe.replay for recipe in restore.recipes.values())
    return frozenset(one for replay in replays if replay is not None for one in replay.sources)


def check_dumped(turn: Turn) -> None:
    """End the run when every node has written its part."""
    dumping = turn.state.doing
    if not isinstance(dumping, Dumping) or dumping.awaited:
        return
    if dumping.held:
        _finish_held(turn, dumping)
        return
    if dumping.exporting:
        return  # its end is awaited
    restore, settings = dumping.restore, turn.config.settings
    turn.emit(Kind.DUMPED, path=restore.path, generation=restore.generation.to_list())
    # Before a time limit the run has exported what could be done in time, while it trained.
    writers = _writers(turn, dumping)
    if settings.exports and dumping.words.exports and writers:
        limit = settings.persist_seconds + settings.close_seconds
        turn.enter(replace(dumping, deadline=turn.now + limit, exporting=True))
        turn.act(ExportDump(restore, writers))
    else:
        _finish_dumped(turn, dumping, "")


def _writers(turn: Turn, dumping: Dumping) -> dict[int, int]:
    """Role -> the node that makes its part of a checkpoint: its own, those of lost ones by turns.

    What a node has dumped is on a disk that all of them share. Empty when no node is left.
    """
    seated = {role: seat.node for role, seat in turn.state.seats.items()}
    nodes = sorted(node for node in dumping.finished if node in turn.state.fleet.nodes)
    if not nodes:
        return {}
    return {
        role: node if node in nodes else nodes[role % len(nodes)]
        for role, node in sorted(seated.items())
    }


def dump_exported(turn: Turn, generation: Generation, path: str) -> None:
    """Take note that what was dumped is a checkpoint at ``path``, too, or could not become one
    (empty): end."""
    match turn.state.doing:
        case Dumping(exporting=True, restore=restore) as dumping:
            if generation == restore.generation:
                _finish_dumped(turn, dumping, path)


def hurry(turn: Turn, dumping: Dumping, reason: str) -> None:
    """Hurry: who asks has no time to lose; the run ends as soon as the state is on the disk."""
    words = dumping.words
    if dumping.exporting:
        _finish_dumped(turn, dumping, "")
    elif words.exports:
        words = replace(words, reason=f"{words.reason}; {reason}", exports=False)
        turn.enter(replace(dumping, words=words))


def stop(turn: Turn, reason: str, *, keeps: bool = False) -> None:
    """The user ends the run (130). One that is dumped ends as that, without the checkpoint: what it
    continues from must be told in any case; one that is being saved keeps its memory, any other
    where the user ``keeps`` it; one that is over waits for nothing any more."""
    match turn.state.doing:
        case Dumping(exporting=True) as dumping:
            _finish_dumped(turn, dumping, "")
        case Ending() | Ended():
            turn.act(Hurry())
        case Dumping(words=words):
            run = PurePath(turn.config.dump_directory).parent
            reason += (
                f" before all was written ({words.reason}): the state stays in memory, 'deadpool"
                f" run --resume {run} --run-dir NEW' goes on from it,"
                f" 'deadpool clean {run}' removes it"
            )
            finish(turn, EXIT_STOPPED, reason, keeps_slots=True)
        case _ if turn.state.restarted and not turn.state.survived:
            # A start that its user has thought better of: what was there before it still is.
            end_as_found(turn, LastWords(EXIT_STOPPED, reason))
        case _:
            keeps = keeps and turn.state.record is not None
            stays = "; what the run holds in memory stays" if keeps else ""
            finish(turn, EXIT_STOPPED, reason + stays, keeps_slots=keeps)


def _finish_dumped(turn: Turn, dumping: Dumping, checkpoint: str) -> None:
    restore, words = dumping.restore, dumping.words
    run = PurePath(restore.path).parent.parent
    reason = (
        f"{words.reason}; state dumped to {restore.path}:"
        f" continue with 'deadpool run --resume {run} --run-dir NEW' and the same other arguments"
    )
    if checkpoint:
        reason += f"; the same state is a checkpoint for Megatron's --load in {checkpoint}"
    finish(turn, words.status, reason, restore, words.kind)


def _finish_held(turn: Turn, dumping: Dumping) -> None:
    words, restore = dumping.words, dumping.restore
    run = PurePath(restore.path).parent
    if dumping.finished:
        turn.emit(Kind.DUMPED, path=restore.path, generation=restore.generation.to_list())
        written = f"nodes {sorted(dumping.finished)} wrote what they held to {restore.path}"
        words = replace(
            words,
            reason=f"{words.reason}; {written}: 'deadpool run --resume {run} --run-dir NEW' goes on"
            " from the newest generation that is whole with what other hosts still have in memory",
        )
    _finish_with_slots(turn, words, dumping.resume)


def finish(
    turn: Turn,
    status: int,
    reason: str,
    resume: Restore | None = None,
    kind: FailureKind | None = None,
    *,
    keeps_slots: bool = False,
    is_early: bool = False,
) -> None:
    """End the run; the agents get ``close_seconds`` to go. ``keeps_slots``: what is in memory stays
    there, for a start with the same run directory. When it is over, and what was asked for is
    valid, the coordinator says so (RUN_ENDED)."""
    if isinstance(turn.state.doing, Ending | Ended):
        return
    turn.end_recovery()
    deadline = turn.now + turn.config.settings.close_seconds
    blame = replace(turn.state.blame, suspicion=None)
    turn.state = turn.state._replace(doing=Ending(deadline, status), blame=blame)
    named = str(kind or "")
    turn.act(Finish(status, reason, resume, named, keeps_slots, is_early))
    check_ended(turn)


def check_ended(turn: Turn, *, overdue: bool = False) -> None:
    """Exit when all agents have gone."""
    match turn.state.doing:
        case Ending(status=status) if overdue or not turn.state.fleet.nodes:
            turn.enter(Ended())
            turn.act(Exit(status))
