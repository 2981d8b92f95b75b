"""Finds the state from which a new run continues an earlier run (--resume)."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from deadpool_megatron.cli.common import CommandError, StatusPoller
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cluster.agent.process import dump_orphans, last_record
from deadpool_megatron.cluster.coordinator.new_checkpoint import export_directory, remove_unfinished
from deadpool_megatron.cluster.journal.journal import JournalError
from deadpool_megatron.cluster.process import program
from deadpool_megatron.cluster.run_directory import cleanup, directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.planner import is_rolled_back
from deadpool_megatron.layout.records import Restore
from deadpool_megatron.state import frozen_file
from deadpool_megatron.vault.disk.sources import last_boundary, newest_whole
from deadpool_megatron.vault.errors import SegmentError, VaultError

_PAUSE_SECONDS = 0.2


class PeerAgents:
    """The agents of a cluster that resume a run together. Each agent writes the old run's memory on
    its host to files, and reports this in the new run's directory. The agent that decides waits for
    the others, whose files may complete the state."""

    def __init__(
        self, run: RunDirectory, agents: int, node: int | None, wait_seconds: float
    ) -> None:
        self.wait_seconds = wait_seconds
        self._run = run
        self._agents = agents
        # The same name at a second attempt, so that an agent is counted once.
        self._name = socket.gethostname() if node is None else f"{socket.gethostname()}-{node}"

    def report_done(self) -> None:
        """Report that the memory of this agent's host is written."""
        directory = self._run.resuming
        directory.mkdir(parents=True, exist_ok=True)
        (directory / self._name).touch()

    def are_done(self) -> bool:
        """Return whether all agents have reported, or an agent has decided already."""
        is_created = (self._run.path / run_files.RUN_FILE).exists()
        return is_created or len(list(self._run.resuming.iterdir())) >= self._agents


def resume_point(
    old: RunDirectory, args: argparse.Namespace, peers: PeerAgents | None = None
) -> tuple[list[Restore], int]:
    """Return the states from which a new run continues an earlier run, best first, and the role of
    the new run's rank 0, as state in dumps has the role numbers of the earlier run. Print the
    choice.

    The memory of the earlier run on this host, and on the hosts of ``peers``, is dumped first. The
    newest complete generation in the dumps is the best state, unless a checkpoint is as new. A run
    with another number of roles continues from a checkpoint, which Megatron reshards. Raises
    CommandError if there is no state.
    """
    info = old.read_run()
    refuse_while_training(old, info, "--resume")
    roles = args.nodes * args.nproc_per_node
    history, old_roles, dump, reasons = History(), [*range(info.world_size)], None, list[str]()
    try:
        if (record := last_record(old)) is not None:
            history, old_roles = record.history, sorted(record.seats)
    except (JournalError, OSError) as error:
        print(f"--resume {old.path}: {error}", flush=True)
        reasons = [str(error)]
    else:
        dump, reasons = _newest_dump(old, info, old_roles, history.kept, peers)
        if reasons and (sizes := history.sizes) is not None:
            # If the run ended during a change of its size, the newest state may have another size.
            for size in sizes.replicas:
                others = sizes.roles(size * sizes.ranks_per_replica, info.settings.first_role)
                other, _ = newest_whole(old.dump, others, history.kept)
                newest = -1 if dump is None else dump.generation.iteration
                if other is not None and other.generation.iteration > newest:
                    old_roles, dump, reasons = [*others], other, []
    durable, problems = saved_states(old, info, old_roles, history)
    if len(old_roles) != roles:
        return _for_other_roles(old, len(old_roles), roles, dump, durable), 0
    if dump is None and not durable:
        text = "; ".join([*problems, *reasons[:3]])
        state = "has no durable state"
        with contextlib.suppress(run_files.RunDirectoryError):
            if (end := old.read_final())["exit_status"] == 0:
                state = f"is complete ({end['iterations']} iterations), and {state}"
        raise CommandError(f"--resume {old.path}: that run {state}{text and f': {text}'}")
    reasons += problems
    text = "; ".join(reasons[:3])
    if dump is not None and (
        not durable or dump.generation.iteration > durable[0].generation.iteration
    ):
        where = f"{dump.generation.lineage}:{dump.generation.iteration} in the dump {dump.path}"
        print(f"continues from generation {where}{text and f'; {text}'}", flush=True)
        return [run_files.with_identity(dump), *durable], old_roles[0]
    kind = "dump" if durable[0].kind == "dump" else "checkpoint"
    choice = f"continues from the {kind} {durable[0].path} of iteration"
    if durable[0].kind == "initial":
        choice = "that run had computed nothing: begins at iteration"
    print(f"{choice} {durable[0].generation.iteration}{text and f': {text}'}", flush=True)
    return durable, old_roles[0]


def refuse_while_training(run: RunDirectory, info: RunInfo, flag: str) -> None:
    """Raise CommandError if the run is still training. An answer of its coordinator proves this. If
    an agent may be alive, wait for the answer until a standby could have taken over.
    """
    poller, settings = StatusPoller(run), info.settings
    limit = time.monotonic() + 2 * settings.takeover_seconds + settings.fence_seconds
    while not run.has_final():
        status, is_late = poller.status(), time.monotonic() > limit
        alive = cleanup.working_processes(run, info.run_id)
        if status is not None or (is_late and alive):
            at = "" if status is None else f", at iteration {status['iteration']}"
            raise CommandError(
                f"{flag} {run.path}: that run is still training{at}:"
                f" 'deadpool stop --dump {run.path}' ends it and saves its state"
            )
        if is_late or not run.node_listings() or not cleanup.may_be_alive(run):
            return
        time.sleep(_PAUSE_SECONDS)


def _for_other_roles(
    old: RunDirectory, old_roles: int, roles: int, dump: Restore | None, durable: list[Restore]
) -> list[Restore]:
    """Return the checkpoints of a run of ``old_roles`` roles for a run of ``roles``: dumps fit only
    their own number. Raises CommandError if there is no checkpoint."""
    checkpoints = [state for state in durable if state.kind == "durable"]
    dumps = [state for state in (dump, *durable) if state is not None and state.kind == "dump"]
    newest = max((state.generation.iteration for state in dumps), default=0)
    note = f"; its dump of iteration {newest} is for {old_roles} roles only" if dumps else ""
    if not checkpoints:
        raise CommandError(
            f"--resume {old.path}: that run has {old_roles} roles, this one {roles}, and there is"
            f" no checkpoint to continue from with another number{note}: give as many nodes as it"
            " had (exports during training, --deadpool-persist-interval, would fit any number)"
        )
    best, iteration = checkpoints[0], checkpoints[0].generation.iteration
    newer = note if newest > iteration else ""
    print(
        f"continues with {roles} roles instead of {old_roles} from the checkpoint {best.path} of"
        f" iteration {iteration}{newer}",
        flush=True,
    )
    return checkpoints


def saved_states(
    old: RunDirectory, info: RunInfo, roles: Collection[int], history: History
) -> tuple[list[Restore], list[str]]:
    """Return the usable checkpoints and dumps of the run with these roles, best first, and the
    problems of the others. The states from which the run itself began come last."""
    problems = list[str]()
    try:
        states = run_files.read_valid(old.latest)
    except FileNotFoundError:
        states = ()
    except OSError as error:
        raise CommandError(f"--resume {old.path}: {old.latest}: {error.strerror}") from error
    except ValueError:
        states, problems = (), [f"{old.latest} is damaged"]
    paths = {state.path for state in states}
    others = [state for state in run_files.found_in(old.saves) if state.path not in paths]
    newest = states[0].generation.iteration if states else -1
    newer = [state for state in others if state.generation.iteration > newest]
    states = (*newer, *states, *others[len(newer) :])
    paths = {state.path for state in states}
    origins = [state for state in info.restore if state.path not in paths]
    usable = list[Restore]()
    for state in (*states, *origins):
        problem = _problem_of(state, roles, history if state in states else None)
        if problem:
            problems.append(problem)
        else:
            usable.append(state)
    saved = [run_files.with_identity(state) for state in usable if state.kind != "initial"]
    return saved or usable[:1], problems


def _problem_of(restore: Restore, roles: Collection[int], history: History | None) -> str:
    """Return the reason why a run cannot continue from a state; empty if it can. ``history``: the
    history of the earlier run, if that run wrote the state, else None."""
    if restore.kind == "initial":
        return ""
    if not run_files.is_there(restore):
        return f"{restore.path} does not exist any more, or is not what was saved"
    if restore.kind == "dump":
        boundary, lacking = last_boundary(Path(restore.path), restore.generation, roles)
        return f"{restore.path} lacks {lacking}" if boundary is None else ""
    # The checkpoint became valid before the non-finite numbers were noticed.
    if history and is_rolled_back(restore.generation, history.nonfinite):
        return (
            f"{restore.path} was computed from numbers that were not finite, and that run had gone"
            " back to an older state"
        )
    return ""


def copy_frozen_weights(old: Path | None, run: RunDirectory, restore: Iterable[Restore]) -> None:
    """Copy the frozen weights of the old run before a process needs them: a dump refers to files in
    the old directory, later generations to files in the new directory. Raises CommandError.
    """
    if old is None or all(state.kind != "dump" for state in restore):
        return
    source = RunDirectory(old).frozen
    started = time.monotonic()
    try:
        with closing(Display(sys.stderr)) as display:
            show = partial(display.status, f"copies frozen weights to {run.frozen}")
            copied_bytes = frozen_file.copy_files(source, run.frozen, show)
    except OSError as error:
        needed = sum(path.stat().st_size for path in frozen_file.files_in(source))
        raise CommandError(
            f"--resume {old}: its frozen weights ({needed} bytes) cannot be copied to {run.frozen}:"
            f" {error.strerror or error}; make room there, and remove {run.path} before the next"
            " try"
        ) from error
    if copied_bytes:
        seconds = time.monotonic() - started
        print(f"{copied_bytes} bytes of frozen weights copied in {seconds:.1f} s", flush=True)


def copy_notes(old: Path | None, run: RunDirectory) -> None:
    """Copy the notes of the old run's processes for their successors."""
    if old is not None:
        program.inherit_program(old, run.path)
        with contextlib.suppress(FileNotFoundError):  # the old run may have built nothing
            shutil.copy(RunDirectory(old).built, run.built)


def dump_remaining_memory(old: RunDirectory) -> None:
    """Write the old run's memory on this host to its dump, for another agent that has decided to
    resume the run. Raises CommandError if the memory cannot be written.
    """
    info = old.read_run()
    try:
        record = last_record(old)
    except (JournalError, OSError) as error:
        print(f"--resume {old.path}: {error}", flush=True)
    else:
        _dump_memory(old, info, {} if record is None else record.history.kept)


def _newest_dump(
    old: RunDirectory,
    info: RunInfo,
    roles: Collection[int],
    kept: Mapping[int, int],
    peers: PeerAgents | None,
) -> tuple[Restore | None, list[str]]:
    """Write the memory on this host, wait for ``peers``, and return the newest complete dump, with
    the reasons against newer dumps. ``kept``: the kept lineages (planner.keep_lineages)."""
    _dump_memory(old, info, kept)
    if peers is None:
        return newest_whole(old.dump, roles, kept)
    peers.report_done()
    file_count, limit, is_reported = -1, 0.0, False
    while True:
        # Wait while files arrive, which shows in their number.
        before, file_count = file_count, sum(1 for _ in old.dump.glob("*/*.seg"))
        if file_count != before:
            limit = time.monotonic() + peers.wait_seconds
        is_last_poll = peers.are_done() or time.monotonic() > limit
        dump, reasons = newest_whole(old.dump, roles, kept)
        if is_last_poll or (dump is not None and not reasons):
            return dump, reasons
        if not is_reported:
            lacking = reasons[0] if reasons else "nothing has been written yet"
            print(
                f"--resume {old.path}: {lacking}; waits for the other agents to write the state"
                f" on their hosts, until no file arrives for {peers.wait_seconds:g} s",
                flush=True,
            )
            is_reported = True
        time.sleep(_PAUSE_SECONDS)


def _dump_memory(old: RunDirectory, info: RunInfo, kept: Mapping[int, int]) -> None:
    """Write the run's memory on this host to its dump, if none of its processes works here."""
    if cleanup.working_processes(old, info.run_id):
        return
    try:
        # Only this run removes its unfinished checkpoints, and the dump may need the space.
        remove_unfinished(export_directory(info.settings, old), info.run_id)
        with closing(Display(sys.stderr)) as display:
            text = f"writes the state in memory to {old.dump}"
            dump_orphans(old, info, kept, partial(display.status, text))
    except (VaultError, OSError) as error:
        # The memory may be newer than all files, so the user must decide to continue without it.
        remedy = "" if isinstance(error, SegmentError) else "make room, or "
        raise CommandError(
            f"--resume {old.path}: what it has left in memory cannot be written: {error};"
            f" {remedy}give it up with 'deadpool clean {old.path}'"
        ) from error
