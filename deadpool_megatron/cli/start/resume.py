"""The point where a new run continues from an earlier one."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import sys
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import Asker, CommandError
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cli.start.scripts import EMBEDDED_TRAINER
from deadpool_megatron.cluster.agent.process import dump_orphans, last_history
from deadpool_megatron.cluster.coordinator.durable import export_directory, remove_unfinished
from deadpool_megatron.cluster.journal.journal import JournalError
from deadpool_megatron.cluster.process import program
from deadpool_megatron.cluster.run_directory.cleanup import (
    may_be_alive,
    run_processes,
    vault_processes,
)
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunDirectoryError,
    RunInfo,
    as_dict,
    found_in,
    identified,
    is_there,
    read_valid,
    valid_in,
)
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.planner import is_thrown_away
from deadpool_megatron.layout.records import Restore
from deadpool_megatron.state import frozen_file
from deadpool_megatron.vault.disk.sources import last_boundary, newest_whole
from deadpool_megatron.vault.errors import SegmentError, VaultError

_PAUSE_SECONDS = 0.2


class Others:
    """The agents of a cluster that resume a run together. Each writes what its own host has left,
    and says so in the new run's directory; the one that decides waits for those that may complete
    what it has found."""

    def __init__(
        self, run: RunDirectory, agents: int, node: int | None, patience_seconds: float
    ) -> None:
        self.patience_seconds = patience_seconds
        self._run = run
        self._agents = agents
        # The same at a second try: what a host has written once is written.
        self._name = socket.gethostname() if node is None else f"{socket.gethostname()}-{node}"

    def done(self) -> None:
        """This agent's host has been looked at."""
        directory = self._run.resuming
        directory.mkdir(parents=True, exist_ok=True)
        (directory / self._name).touch()

    def are_done(self) -> bool:
        """Return whether all have said so, or one of them has decided already."""
        made = (self._run.path / "run.json").exists()
        return made or len(list(self._run.resuming.iterdir())) >= self._agents


def resume_point(
    old: RunDirectory, args: argparse.Namespace, others: Others | None = None
) -> Mapping[str, Any]:
    """Return where an earlier run can be continued from: the newest generation that is whole in its
    dumps (with what it has left in memory of this host, and of the hosts of ``others``), or its
    newest checkpoint, whichever is newer.

    A run of another number of roles continues from a checkpoint, which Megatron reshards. Says so
    in a line. Raises CommandError when there is none.
    """
    info = old.read_run()
    refuse_while_training(old, info, "--resume")
    roles = args.nodes * args.nproc_per_node
    history: History | None = None
    whole, why_not = None, list[str]()
    try:
        history = last_history(old)
    except (JournalError, OSError) as error:
        print(f"--resume {old.path}: {error}", flush=True)
        why_not = [str(error)]
    else:
        whole, why_not = _whole(old, info, history.kept, others)
    durable, lacking = _durable(old, info, history)
    if info.world_size != roles:
        if tuple(args.command[:2]) == EMBEDDED_TRAINER:
            raise CommandError(
                f"--resume {old.path}: that run has {info.world_size} roles, this one {roles}: the"
                " embedded trainer needs as many as wrote its checkpoints; give as many nodes as"
                " that run had"
            )
        return as_dict(_for_other_roles(old, info.world_size, roles, whole, durable))
    if whole is None and not durable:
        told = f": {'; '.join([*lacking, *why_not[:3]])}" if lacking or why_not else ""
        what = "has no durable state"
        with contextlib.suppress(RunDirectoryError):
            if (end := old.read_final())["exit_status"] == 0:
                what = f"is complete ({end['iterations']} iterations), and {what}"
        raise CommandError(f"--resume {old.path}: that run {what}{told}")
    why_not += lacking
    if whole is not None and (
        not durable or whole.generation.iteration > durable[0].generation.iteration
    ):
        newer = f"; {'; '.join(why_not[:3])}" if why_not else ""
        print(
            f"continues from generation {_named(whole)} in the dump {whole.path}{newer}", flush=True
        )
        return as_dict([identified(whole), *durable])
    kind = "dump" if durable[0].kind == "dump" else "checkpoint"
    reasons = f": {'; '.join(why_not[:3])}" if why_not else ""
    text = f"continues from the {kind} {durable[0].path} of iteration"
    if durable[0].kind == "initial":
        text = "that run had computed nothing: begins at iteration"
    print(f"{text} {durable[0].generation.iteration}{reasons}", flush=True)
    return as_dict(durable)


def refuse_while_training(run: RunDirectory, info: RunInfo, flag: str) -> None:
    """Two runs of one training are a mistake. A coordinator of this run that answers proves that it
    lives; where an agent may, one that follows another has its time to come. Raises CommandError.
    """
    asker, settings = Asker(run), info.settings
    limit = time.monotonic() + 2 * settings.takeover_seconds + settings.fence_seconds
    while not run.has_final():
        status, is_late = asker.status(), time.monotonic() > limit
        here = set(run_processes(run, info.run_id)) - set(vault_processes(run, info.run_id))
        if status is not None or (is_late and here):
            at = "" if status is None else f", at iteration {status['iteration']}"
            raise CommandError(
                f"{flag} {run.path}: that run is still training{at}:"
                f" 'deadpool stop --dump {run.path}' ends it and saves its state"
            )
        if is_late or not run.node_listings() or not may_be_alive(run):
            return
        time.sleep(_PAUSE_SECONDS)


def _for_other_roles(
    old: RunDirectory, known: int, roles: int, whole: Restore | None, durable: list[Restore]
) -> list[Restore]:
    """The checkpoints among what a run of ``known`` roles has left: a dump is of them only."""
    found = [one for one in durable if one.kind == "durable"]
    dumps = [one for one in (whole, *durable) if one is not None and one.kind == "dump"]
    newest = max((one.generation.iteration for one in dumps), default=0)
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


def _durable(
    old: RunDirectory, info: RunInfo, history: History | None
) -> tuple[list[Restore], list[str]]:
    """The checkpoints and dumps of the run that can be continued from, the best first, and why
    others cannot. What it began with itself comes last."""
    lacking = list[str]()
    try:
        noted = read_valid(old.latest)
    except FileNotFoundError:
        noted = ()
    except OSError as error:
        raise CommandError(f"--resume {old.path}: {old.latest}: {error.strerror}") from error
    except ValueError:
        noted, lacking = (), [f"{old.latest} is damaged"]
    known = {one.path for one in noted}
    found = [one for one in found_in(old.saves) if one.path not in known]
    newest = noted[0].generation.iteration if noted else -1
    newer = [one for one in found if one.generation.iteration > newest]
    noted = (*newer, *noted, *found[len(newer) :])
    began = [one for one in valid_in(info.restore) if one.path not in {n.path for n in noted}]
    good = list[Restore]()
    for one in (*noted, *began):
        if why := _objection(one, range(info.world_size), history if one in noted else None):
            lacking.append(why)
        else:
            good.append(one)
    return [identified(one) for one in good if one.kind != "initial"] or good[:1], lacking


def _objection(restore: Restore, roles: Collection[int], history: History | None) -> str:
    """Return why a run does not continue from it; empty if it does."""
    if restore.kind == "initial":
        return ""
    if not is_there(restore):
        return f"{restore.path} does not exist any more, or is not what was saved"
    if restore.kind == "dump":
        boundary, lacking = last_boundary(Path(restore.path), restore.generation, roles)
        return f"{restore.path} lacks {lacking}" if boundary is None else ""
    # It became valid before the loss was known; the next checkpoint would have replaced it.
    if history and is_thrown_away(restore.generation, history.nonfinite):
        return (
            f"{restore.path} was computed from numbers that were not finite, and that run had gone"
            " back to an older state"
        )
    return ""


def bring_frozen_weights(old: Path | None, run: RunDirectory, restore: Mapping[str, Any]) -> None:
    """The generation that a new run continues from names files in the directory of the old one;
    those after it are in the new one. Before the first process needs them, all are.

    Raises CommandError.
    """
    kinds = {one.get("kind") for one in (restore, *restore.get("older", ()))}
    if old is None or "dump" not in kinds:
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


def bring_notes(old: Path | None, run: RunDirectory) -> None:
    """Bring what the processes of the earlier run have noted for those that come later."""
    if old is not None:
        program.bring(old, run.path)
        with contextlib.suppress(FileNotFoundError):  # it may never have built anything
            shutil.copy(RunDirectory(old).built, run.built)


def write_what_is_left(old: RunDirectory) -> None:
    """Of a run that another agent has decided to continue with: what it has left in memory here.

    Raises CommandError when it cannot be written.
    """
    info = old.read_run()
    try:
        kept = last_history(old).kept
    except (JournalError, OSError) as error:
        print(f"--resume {old.path}: {error}", flush=True)
        return
    _make_orphan_dump(old, info, kept)


def _whole(
    old: RunDirectory, info: RunInfo, kept: Mapping[int, int], others: Others | None
) -> tuple[Restore | None, list[str]]:
    _make_orphan_dump(old, info, kept)
    if others is None:
        return newest_whole(old.dump, range(info.world_size), kept)
    others.done()
    written, limit, told = -1, 0.0, False
    while True:
        # Whoever writes is waited for: from one look to the next there are more files.
        before, written = written, sum(1 for _ in old.dump.glob("*/*.seg"))
        if written != before:
            limit = time.monotonic() + others.patience_seconds
        is_last_look = others.are_done() or time.monotonic() > limit
        whole, why_not = newest_whole(old.dump, range(info.world_size), kept)
        if is_last_look or (whole is not None and not why_not):
            return whole, why_not
        if not told:
            lacking = why_not[0] if why_not else "nothing has been written yet"
            print(
                f"--resume {old.path}: {lacking}; waits for the other agents to write the state"
                f" on their hosts, until no file arrives for {others.patience_seconds:g} s",
                flush=True,
            )
            told = True
        time.sleep(_PAUSE_SECONDS)


def _make_orphan_dump(old: RunDirectory, info: RunInfo, kept: Mapping[int, int]) -> None:
    alive = set(run_processes(old, info.run_id)) - set(vault_processes(old, info.run_id))
    try:
        if not alive:
            # No other run would ever do it, and a dump may need the room.
            remove_unfinished(export_directory(info.settings, old), info.run_id)
            with closing(Display(sys.stderr)) as display:
                text = f"writes the state in memory to {old.dump}"
                dump_orphans(old, info, kept, partial(display.status, text))
    except (VaultError, OSError) as error:
        # What is in memory may be newer than anything on disk: to go on without it is no accident.
        remedy = "" if isinstance(error, SegmentError) else "make room, or "
        raise CommandError(
            f"--resume {old.path}: what it has left in memory cannot be written: {error};"
            f" {remedy}give it up with 'deadpool clean {old.path}'"
        ) from error


def _named(restore: Restore) -> str:
    return f"{restore.generation.lineage}:{restore.generation.iteration}"
