"""Restarts a run whose processes have all died, in its own run directory.

The journal, the node numbers and the events continue, and the nodes attach to the slots that they
left in memory. The restart may change the command and the settings, but neither the number of roles
nor settings that determine the slots.
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
from deadpool_megatron.cli.common import CommandError, size_conflict
from deadpool_megatron.cli.start.resume import refuse_while_training
from deadpool_megatron.cluster.journal.journal import QUARANTINED, REMOVED, Journal
from deadpool_megatron.cluster.journal.terms import newest_term
from deadpool_megatron.cluster.process import program
from deadpool_megatron.cluster.run_directory import cleanup, directory
from deadpool_megatron.events import DAMAGE, Kind, event_files, parse_line
from deadpool_megatron.layout.records import EpochRecord, Restore
from deadpool_megatron.preflight.host import numeric_variables
from deadpool_megatron.settings import Settings, flag_name

_PAUSE_SECONDS = 0.1
_TAIL_BYTES = 4 << 20


@dataclass(frozen=True)
class Restart:
    """A restart. ``info``: the new facts of the run; ``numbers``: the nodes to start, with new
    numbers instead of those of lost nodes."""

    info: directory.RunInfo
    numbers: tuple[int, ...]


def lock_directory(run: directory.RunDirectory) -> int:
    """Reserve the directory for this launcher, until the returned descriptor is closed. Raises
    CommandError if another launcher has it: at its end, a second launcher would kill the first run
    and remove its memory. A launcher on another host is noticed if the file system supports locks.
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


def find_restart(
    run: directory.RunDirectory, args: argparse.Namespace, settings: Settings
) -> Restart | None:
    """Return the restart of the run in ``--run-dir``; None if there is no run, or only the result
    of a run that is over. Raises CommandError if the run cannot continue with these arguments.
    """
    try:
        old = run.read_run()
    except (directory.RunDirectoryError, NotADirectoryError):
        runs = [run_id for run_id, path in cleanup.runs_in_memory().items() if path == run.path]
        live = [run_id for run_id in runs if nodes_with_slots(run_id)]
        if live and not args.from_scratch and not (run.path / directory.RUN_FILE).exists():
            raise CommandError(
                f"run {live[0]} has its state in memory, and its directory {run.path} was removed:"
                " put it back, or give the state up ('deadpool clean', or --from-scratch)"
            ) from None
        return None
    if run.launcher_lock.exists():
        os.close(lock_directory(run))  # refuse at once if the launcher of the run is alive
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
        return None  # the run has ended after its launcher
    if conflict := size_conflict(args, old, "nodes", "nproc_per_node"):
        flag, value, run_value = conflict
        raise CommandError(f"the run in {run.path} has {flag} {run_value}, not {value}")
    if _may_have_slots(run, old) and (other := slot_conflict(old.settings, asdict(settings))):
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
        environment=numeric_variables(),
        ended_term=0 if term is None else term.number,
        ended_epoch=0 if epoch is None else epoch[0],
    )
    return Restart(info, _node_numbers(journal, info))


def prepare_directory(run: directory.RunDirectory, restart: Restart) -> str:
    """Prepare the directory for the new processes; return a line for the user."""
    if run.final.exists():
        number = len(list(run.path.glob("final-*.json"))) + 1
        run.final.rename(run.final.with_name(f"final-{number}.json"))
    run.coordinator.unlink(missing_ok=True)
    is_new_command = run.read_run().command != restart.info.command
    if is_new_command and run.templates.exists():
        # Templates of the old command's state must not serve the new command. Remove them before
        # the new command is written, so that after an interrupt here the next restart still sees
        # a difference.
        shutil.rmtree(run.templates)
    # An earlier start that decided no epoch may have left this folder.
    shutil.rmtree(run.path / program.FOLDER / str(restart.info.ended_epoch), ignore_errors=True)
    run.replace_run(restart.info)
    nodes = nodes_with_slots(restart.info.run_id)
    text = f"slots of {nodes} nodes are in memory" if nodes else "no slots are in memory"
    if is_new_command:
        text += "; its command is another one than before, the state is taken as it is"
    return f"run {restart.info.run_id} is started again; {text}"


def slot_conflict(run_settings: Settings, settings: Mapping[str, Any]) -> str:
    """Return the first of the ``settings`` that does not fit the run's slots, with both values;
    empty if all fit.

    New processes restore from the remaining slots before they can report their needs, so their own
    slots must be like these. The hash of the layout does not cover these settings, as a dump fits
    any slots.
    """
    for name in ("max_lag", "extras_room_mb"):
        run_value = getattr(run_settings, name)
        if (value := settings.get(name, run_value)) != run_value:
            return f"{flag_name(name)} {run_value:.15g}, not {value:.15g}"
    return ""


def _may_have_slots(run: directory.RunDirectory, info: directory.RunInfo) -> bool:
    """Return whether this host has slots of the run, or the run had a node on another host, whose
    memory is not visible here."""
    has_others = any(not cleanup.is_here(listing) for listing in run.node_listings().values())
    return has_others or nodes_with_slots(info.run_id) > 0


def nodes_with_slots(run_id: str) -> int:
    """Return the number of nodes of the run with slots in this host's memory."""
    return sum(any(node.glob("*.seg")) for node in cleanup.node_directories(run_id))


def _has_state(run: directory.RunDirectory, info: directory.RunInfo) -> bool:
    """Return whether the memory of this host, or files, hold a state, complete or not."""
    newest: tuple[Restore, ...] = ()
    with contextlib.suppress(FileNotFoundError, ValueError):
        newest = directory.read_valid(run.latest)
    states = (*newest, *info.restore)
    saved = [state for state in states if state.kind != "initial"]
    return nodes_with_slots(info.run_id) > 0 or any(map(directory.is_there, saved))


def _finished_iterations(run: directory.RunDirectory) -> int:
    """Return the last finished iteration according to the newest events; 0 if there is none."""
    newest = 0
    for path in reversed(event_files(run.events)):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            for line in file:
                with contextlib.suppress(*DAMAGE):  # the first and last lines may be cut off
                    event = parse_line(line)
                    if event.kind is Kind.STEP:
                        newest = max(newest, event.iteration or 0)
        if newest:
            break
    return newest


def _is_over(run: directory.RunDirectory) -> bool:
    return run.final.exists() and not directory.slots_are_kept(run)


def _await_end(run: directory.RunDirectory, old: directory.RunInfo) -> None:
    """Wait for processes that have only just noticed the launcher's exit. Raises CommandError if
    processes of the run remain."""
    limit = time.monotonic() + old.settings.close_seconds
    while alive := cleanup.working_processes(run, old.run_id):
        if time.monotonic() > limit:
            raise CommandError(
                f"--run-dir {run.path} is in use by run {old.run_id}, which is alive"
                f" (processes {alive[:5]}); 'deadpool stop {run.path}' ends it"
            )
        time.sleep(_PAUSE_SECONDS)


def _node_numbers(journal: Journal, info: directory.RunInfo) -> tuple[int, ...]:
    """Return the nodes to start: nodes with roles, then other nodes, without lost nodes, and new
    numbers up to the wanted size. All nodes with roles are included."""
    wanted = info.nodes + info.spares
    newest = journal.newest("epoch")
    if newest is None:
        return tuple(range(wanted))
    record = EpochRecord.from_dict(newest[1])
    history = record.history
    removed, quarantined = journal.numbers(REMOVED), journal.numbers(QUARANTINED)
    lost_nodes = {*history.removed, *removed, *history.quarantined, *quarantined}
    used_numbers = {*record.nodes, *lost_nodes, *journal.numbers("node")}
    seated = {seat.node for seat in record.seats.values()}
    kept_nodes = sorted(set(record.nodes) - lost_nodes, key=lambda node: (node not in seated, node))
    new_numbers = range(max(used_numbers) + 1, max(used_numbers) + 1 + wanted)
    return tuple([*kept_nodes, *new_numbers][: max(wanted, len(seated - lost_nodes))])
