"""A run whose processes have all died is started again with its own run directory.

Its journal, numbers and events continue; its nodes take up the slots that they left in memory.
Which command and settings it has from then on is what it is started with; only its size must stay,
and what its slots in memory were made with.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deadpool_megatron import file_systems
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start.resume import refuse_while_training
from deadpool_megatron.cluster.journal.journal import GONE, WRONG, Journal
from deadpool_megatron.cluster.journal.terms import newest_term
from deadpool_megatron.cluster.process import program
from deadpool_megatron.cluster.run_directory import directory
from deadpool_megatron.cluster.run_directory.cleanup import (
    is_here,
    node_directories,
    run_processes,
    runs_in_memory,
    vault_processes,
)
from deadpool_megatron.events import DAMAGE, Kind, event_files, parse_line
from deadpool_megatron.layout.records import EpochRecord, Restore
from deadpool_megatron.layout.schemes import SchemeKind
from deadpool_megatron.settings import Settings, flag_name

_PAUSE_SECONDS = 0.1
_TAIL_BYTES = 4 << 20


@dataclass(frozen=True)
class Restart:
    """``numbers``: of the nodes to start; those that were given up come under new ones."""

    info: directory.RunInfo
    numbers: tuple[int, ...]


def hold(run: directory.RunDirectory) -> int:
    """Have the directory for this launcher alone, until the descriptor is closed. Raises
    CommandError: one that comes second would, at its end, kill the run of the first one and remove
    its memory. Of a launcher on another host only the file system knows, if it knows locks at all.
    """
    run.make()
    lock = os.open(run.launcher_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        file_systems.lock(lock, run.launcher_lock)
    except BlockingIOError as error:
        os.close(lock)
        raise CommandError(
            f"--run-dir {run.path} is in use by another 'deadpool run', here or on another host"
        ) from error
    return lock


def restart_of(
    run: directory.RunDirectory, args: argparse.Namespace, settings: Settings
) -> Restart | None:
    """Return what is left in ``--run-dir`` to continue from; None when there is nothing, or nothing
    but the result of a run that is over. Raises CommandError when it cannot continue as it was
    asked to.
    """
    try:
        old = run.read_run()
    except (directory.RunDirectoryError, NotADirectoryError):
        left = [one for one, path in runs_in_memory().items() if path == run.path]
        left = [one for one in left if any(d for d in node_directories(one) if [*d.glob("*.seg")])]
        if left and not args.from_scratch and not (run.path / directory.RUN_FILE).exists():
            raise CommandError(
                f"run {left[0]} has its state in memory, and its directory {run.path} was removed:"
                " put it back, or give the state up ('deadpool clean', or --from-scratch)"
            ) from None
        return None
    if run.launcher_lock.exists():
        os.close(hold(run))  # whose launcher lives is not to be waited for
    if _is_over(run):
        return None
    if args.resume is not None:
        raise CommandError(
            f"--run-dir {run.path} holds a run that can continue: leave --resume out, or choose"
            " another directory"
        )
    _await_end(run, old)
    refuse_while_training(run, old, "--run-dir")
    if _is_over(run):
        return None  # it came to its end without its launcher
    for flag, given, known in (
        ("--nodes", args.nodes, old.nodes),
        ("--nproc-per-node", args.nproc_per_node, old.nproc_per_node),
    ):
        if given != known:
            raise CommandError(f"the run in {run.path} has {flag} {known}, not {given}")
    if _may_have_slots(run, old) and (other := other_slots(old.settings, asdict(settings))):
        raise CommandError(
            f"the run in {run.path} has {other}, which its slots in memory were made with: start it"
            " with the value that it had, or continue from its memory with the other one in a new"
            f" directory: 'deadpool run --resume {run.path} --run-dir NEW'"
        )
    journal = Journal(run.journal)
    term, epoch = newest_term(journal), journal.newest("epoch")
    finished = _finished_iterations(run)
    if finished and not args.from_scratch and not _has_state(run, old):
        raise CommandError(
            f"the run in {run.path} has finished {finished} iterations, and nothing is left of"
            " them: no memory, no dump, no checkpoint; --from-scratch begins again at iteration 0"
        )
    info = replace(
        old,
        finished=finished,
        from_scratch=args.from_scratch,
        command=tuple(args.command),
        settings=settings,
        spares=args.spares,
        ended_term=0 if term is None else term.number,
        ended_epoch=0 if epoch is None else epoch[0],
    )
    return Restart(info, _numbers(journal, info))


def begin(run: directory.RunDirectory, restart: Restart) -> str:
    """Make the directory that of the new processes; returns a line for the user."""
    if run.final.exists():
        kept = len(list(run.path.glob("final-*.json"))) + 1
        run.final.rename(run.final.with_name(f"final-{kept}.json"))
    run.coordinator.unlink(missing_ok=True)
    another = run.read_run().command != restart.info.command
    if another and run.templates.exists():
        # Recipes for what that one built: one that cannot be written now must not be taken for new.
        # Before the new command is noted: who is interrupted here has another one the next time.
        shutil.rmtree(run.templates)
    # Of a start that has decided nothing, if there was one.
    shutil.rmtree(run.path / program.FOLDER / str(restart.info.ended_epoch), ignore_errors=True)
    run.replace_run(restart.info)
    held = nodes_with_slots(restart.info)
    where = f"slots of {held} nodes are in memory" if held else "no slots are in memory"
    if another:
        where += "; its command is another one than before, the state is taken as it is"
    return f"run {restart.info.run_id} is started again; {where}"


def other_slots(known: Settings, given: Mapping[str, Any]) -> str:
    """The first of the ``given`` settings with which slots of a role would be others than those
    that the run has, with both values; empty when there is none.

    New processes get slots like those that are left, from which they are given their state before
    they can say what they need. The layout's hash says nothing of it: a dump fits either.
    """
    names = ["max_lag", "extras_room_mb"]
    if given.get("protection", known.protection) == known.protection == SchemeKind.RECOMPUTE:
        names.append("full_every")  # so many steps are kept beside each copy
    for name in names:
        old = getattr(known, name)
        if (new := given.get(name, old)) != old:
            return f"{flag_name(name)} {old:.15g}, not {new:.15g}"
    return ""


def _may_have_slots(run: directory.RunDirectory, info: directory.RunInfo) -> bool:
    """Return whether there are some on this host, or a node was on another one, whose memory is not
    to be seen from here."""
    elsewhere = any(not is_here(listing) for listing in run.node_listings().values())
    return elsewhere or nodes_with_slots(info) > 0


def nodes_with_slots(info: directory.RunInfo) -> int:
    """Return how many nodes of the run have slots in this host's memory."""
    return sum(any(node.glob("*.seg")) for node in node_directories(info.run_id))


def _has_state(run: directory.RunDirectory, info: directory.RunInfo) -> bool:
    """Return whether there is anything on this host or on disk to continue from; not yet whether it
    is whole."""
    noted: tuple[Restore, ...] = ()
    with contextlib.suppress(FileNotFoundError, ValueError):
        noted = directory.read_valid(run.latest)
    saved = [one for one in (*noted, *directory.valid_in(info.restore)) if one.kind != "initial"]
    return nodes_with_slots(info) > 0 or any(map(directory.is_there, saved))


def _finished_iterations(run: directory.RunDirectory) -> int:
    """The last iteration that is told of, as the end of the events has it."""
    newest = 0
    for path in reversed(event_files(run.events)):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            for line in file:
                with contextlib.suppress(*DAMAGE):  # the first is cut, and the last may be
                    event = parse_line(line)
                    if event.kind is Kind.STEP:
                        newest = max(newest, event.iteration or 0)
        if newest:
            break
    return newest


def _is_over(run: directory.RunDirectory) -> bool:
    return run.final.exists() and not directory.slots_are_kept(run)


def _await_end(run: directory.RunDirectory, old: directory.RunInfo) -> None:
    """Those that notice the end of their launcher only now get their time."""
    limit = time.monotonic() + old.settings.close_seconds
    while alive := set(run_processes(run, old.run_id)) - set(vault_processes(run, old.run_id)):
        if time.monotonic() > limit:
            raise CommandError(
                f"--run-dir {run.path} is in use by run {old.run_id}, which is alive"
                f" (processes {sorted(alive)[:5]}); 'deadpool stop {run.path}' ends it"
            )
        time.sleep(_PAUSE_SECONDS)


def _numbers(journal: Journal, info: directory.RunInfo) -> tuple[int, ...]:
    wanted = info.nodes + info.spares
    newest = journal.newest("epoch")
    if newest is None:
        return tuple(range(wanted))
    record = EpochRecord.from_dict(newest[1])
    history = record.history
    lost = {*history.gone, *journal.numbers(GONE), *history.wrong, *journal.numbers(WRONG)}
    known = {*record.nodes, *lost, *journal.numbers("node")}
    seated = {seat.node for seat in record.seats.values()}
    kept = sorted(set(record.nodes) - lost, key=lambda node: (node not in seated, node))
    fresh = range(max(known) + 1, max(known) + 1 + wanted)
    return tuple([*kept, *fresh][: max(wanted, len(seated - lost))])
