"""The state from which a new run continues an earlier one (--resume)."""

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
    """The agents of a cluster that resume a run together. Each writes the old run's memory on its
    host and reports it in the new run's directory; the agent that decides waits for the others,
    which may complete the state."""

    def __init__(
        self, run: RunDirectory, agents: int, node: int | None, wait_seconds: float
    ) -> None:
        self.wait_seconds = wait_seconds
        self._run = run
        self._agents = agents
        # Equal at a second attempt: a host writes its memory only once.
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
    """Return the states from which a new run continues an earlier run, best first: the newest
    complete generation in its dumps (with its memory on this host and on the hosts of ``peers``) if
    that is newer than its checkpoints, then these. Print the choice. Also return the new run's
    first role: dumps have the numbers of roles with which they were written.

    A run of another number of roles continues from a checkpoint, which Megatron reshards. Raises
    CommandError if there is no such state.
    """
    info = old.read_run()
    refuse_while_training(old, info, "--resume")
    roles = args.nodes * args.nproc_per_node
    history, known, dump, reasons = History(), [*range(info.world_size)], None, list[str]()
    try:
        if (record := last_record(old)) is not None:
            history, known = record.history, sorted(record.seats)
    except (JournalError, OSError) as error:
        print(f"--resume {old.path}: {error}", flush=True)
        reasons = [str(error)]
    else:
        dump, reasons = _newest_dump(old, info, known, history.kept, peers)
        if reasons and (sizes := history.sizes) is not None:
            # A run that ended while it changed its size may have left newer state of the former.
            for size in sizes.replicas:
                others = sizes.roles(size * sizes.ranks_per_replica, info.settings.first_role)
                other, _ = newest_whole(old.dump, others, history.kept)
                newest = -1 if dump is None else dump.generation.iteration
                if other is not None and other.generation.iteration > newest:
                    known, dump, reasons = [*others], other, []
    durable, problems = saved_states(old, info, known, history)
    if len(known) != roles:
        return _for_other_roles(old, len(known), roles, dump, durable), 0
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
        return [run_files.with_identity(dump), *durable], known[0]
    kind = "dump" if durable[0].kind == "dump" else "checkpoint"
    choice = f"continues from the {kind} {durable[0].path} of iteration"
    if durable[0].kind == "initial":
        choice = "that run had computed nothing: begins at iteration"
    print(f"{choice} {durable[0].generation.iteration}{text and f': {text}'}", flush=True)
    return durable, known[0]


def refuse_while_training(run: RunDirectory, info: RunInfo, flag: str) -> None:
    """Raise CommandError if the run is still training. An answer of its coordinator proves that; if
    an agent may be alive, a standby gets the time to take over.
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
    old: RunDirectory, known: int, roles: int, dump: Restore | None, durable: list[Restore]
) -> list[Restore]:
    """Return the checkpoints of a run of ``known`` roles; its dumps fit no other number."""
    found = [state for state in durable if state.kind == "durable"]
    dumps = [state for state in (dump, *durable) if state is not None and state.kind == "dump"]
    newest = max((state.generation.iteration for state in dumps), default=0)
    dumped = f"; its dump of iteration {newest} is for {known} roles only" if dumps else ""
    if not found:
        raise CommandError(
            f"--resume {old.path}: that run has {known} roles, this one {roles}, and there is no"
            f" checkpoint to continue from with another number{dumped}: give as many nodes as it"
            " had (exports during training, --deadpool-persist-interval, would fit any number)"
        )
    iteration = found[0].generation.iteration
    newer = dumped if newest > iteration else ""
    print(
        f"continues with {roles} roles instead of {known} from the checkpoint {found[0].path} of"
        f" iteration {iteration}{newer}",
        flush=True,
    )
    return found


def saved_states(
    old: RunDirectory, info: RunInfo, roles: Collection[int], history: History
) -> tuple[list[Restore], list[str]]:
    """Return the usable checkpoints and dumps of the run with these roles, best first, and the
    problems of others. The state from which the run itself began comes last."""
    problems = list[str]()
    try:
        noted = run_files.read_valid(old.latest)
    except FileNotFoundError:
        noted = ()
    except OSError as error:
        raise CommandError(f"--resume {old.path}: {old.latest}: {error.strerror}") from error
    except ValueError:
        noted, problems = (), [f"{old.latest} is damaged"]
    known = {state.path for state in noted}
    found = [state for state in run_files.found_in(old.saves) if state.path not in known]
    newest = noted[0].generation.iteration if noted else -1
    newer = [state for state in found if state.generation.iteration > newest]
    noted = (*newer, *noted, *found[len(newer) :])
    known = {state.path for state in noted}
    first = [state for state in info.restore if state.path not in known]
    good = list[Restore]()
    for state in (*noted, *first):
        problem = _problem_of(state, roles, history if state in noted else None)
        if problem:
            problems.append(problem)
        else:
            good.append(state)
    saved = [run_files.with_identity(state) for state in good if state.kind != "initial"]
    return saved or good[:1], problems


def _problem_of(restore: Restore, roles: Collection[int], history: History | None) -> str:
    """Return why a run cannot continue from a state; empty if it can."""
    if restore.kind == "initial":
        return ""
    if not run_files.is_there(restore):
        return f"{restore.path} does not exist any more, or is not what was saved"
    if restore.kind == "dump":
        boundary, lacking = last_boundary(Path(restore.path), restore.generation, roles)
        return f"{restore.path} lacks {lacking}" if boundary is None else ""
    # It became valid before the failure was known; the next checkpoint would have replaced it.
    if history and is_rolled_back(restore.generation, history.nonfinite):
        return (
            f"{restore.path} was computed from numbers that were not finite, and that run had gone"
            " back to an older state"
        )
    return ""


def copy_frozen_weights(old: Path | None, run: RunDirectory, restore: Iterable[Restore]) -> None:
    """Copy the frozen weights of the old run, before any process needs them: a dump refers to files
    in the old directory, later generations to files in the new directory. Raises CommandError.
    """
    if old is None or all(state.kind != "dump" for state in restore):
        return
    source = RunDirectory(old).frozen
    started = time.monotonic()
    try:
        with closing(Display(sys.stderr)) as display:
            show = partial(display.status, f"copies frozen weights to {run.frozen}")
            copied = frozen_file.copy_files(source, run.frozen, show)
    except OSError as error:
        needed = sum(path.stat().st_size for path in frozen_file.files_in(source))
        raise CommandError(
            f"--resume {old}: its frozen weights ({needed} bytes) cannot be copied to {run.frozen}:"
            f" {error.strerror or error}; make room there, and remove {run.path} before the next"
            " try"
        ) from error
    if copied:
        seconds = time.monotonic() - started
        print(f"{copied} bytes of frozen weights copied in {seconds:.1f} s", flush=True)


def copy_notes(old: Path | None, run: RunDirectory) -> None:
    """Copy the notes that processes of the old run left for their successors."""
    if old is not None:
        program.inherit_program(old, run.path)
        with contextlib.suppress(FileNotFoundError):  # the old run may have built nothing
            shutil.copy(RunDirectory(old).built, run.built)


def dump_remaining_memory(old: RunDirectory) -> None:
    """Write the old run's memory on this host, after another agent has decided to resume it.
    Raises CommandError if it cannot be written.
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
    _dump_memory(old, info, kept)
    if peers is None:
        return newest_whole(old.dump, roles, kept)
    peers.report_done()
    written, limit, is_reported = -1, 0.0, False
    while True:
        # Wait as long as files arrive: their number grows from one poll to the next.
        before, written = written, sum(1 for _ in old.dump.glob("*/*.seg"))
        if written != before:
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
    if cleanup.working_processes(old, info.run_id):
        return
    try:
        # No other run would remove them, and a dump may need the space.
        remove_unfinished(export_directory(info.settings, old), info.run_id)
        with closing(Display(sys.stderr)) as display:
            text = f"writes the state in memory to {old.dump}"
            dump_orphans(old, info, kept, partial(display.status, text))
    except (VaultError, OSError) as error:
        # Memory may be newer than all files: never continue without it by accident.
        remedy = "" if isinstance(error, SegmentError) else "make room, or "
        raise CommandError(
            f"--resume {old.path}: what it has left in memory cannot be written: {error};"
            f" {remedy}give it up with 'deadpool clean {old.path}'"
        ) from error
