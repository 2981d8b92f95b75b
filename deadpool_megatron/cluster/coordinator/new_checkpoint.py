"""The steps by which a durable checkpoint becomes valid: all its files reach the disk, and one
rename gives it its name.

Checkpoints are of two kinds: saves of the training processes, and exports in the background. Their
writers work independently. Megatron finds the newest checkpoint of a directory through
``latest_checkpointed_iteration.txt``.

The directory of checkpoints may be older than the run. So the run writes each name to a file before
it gives a checkpoint that name. By that file it recognizes an existing checkpoint as its own, from
an earlier request. Any other checkpoint belongs to another run or is torn, and the run neither
falls back to it nor prunes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE
from deadpool_megatron.file_systems import sync, write_text
from deadpool_megatron.layout.records import Restore
from deadpool_megatron.ownership import OwnershipError, check_checkpoint
from deadpool_megatron.settings import Settings

# The owner of a checkpoint: the program, which has saved it, or the exports, which are pruned.
_SAVED = "saved"
_EXPORTED = "exported"
# Directories that either owner may remove as a whole: complete and unfinished checkpoints.
_CHECKPOINT = re.compile(r"\.?iter_\d+|\.export-")
# A save and an export may become valid at the same time, each in a thread.
_latest_lock = threading.Lock()
_SYNCS_AT_ONCE = 16
_TRACKER = "latest_checkpointed_iteration.txt"


class DurableError(Exception):
    """The failure to make a checkpoint valid; the message is one line."""


@contextlib.contextmanager
def _as_durable_error(place: Path) -> Iterator[None]:
    """Raise errors as a DurableError of one line, with ``place`` if they name no file, as on a full
    disk."""
    try:
        yield
    except (run_files.OutsideError, OwnershipError) as error:
        raise DurableError(str(error)) from error
    except OSError as error:
        raise DurableError(f"{error.filename or place}: {error.strerror}") from error


def export_directory(settings: Settings, run: RunDirectory) -> Path:
    """Return the directory for a run's exports whose request names no other directory."""
    return Path(settings.persist_directory) if settings.persist_directory else run.exports


def saves_problem(saves: str | Path | None, environ: Mapping[str, str]) -> str:
    """Return why the run of a process with this environment cannot save to ``saves``, one line;
    empty if it can, or if the process belongs to no run."""
    run_directory = environ.get(run_files.ENVIRONMENT_DIRECTORY)
    if not saves or run_directory is None:
        return ""
    run = RunDirectory(Path(run_directory))
    return overlap_problem(Path(saves), export_directory(Settings.from_environment(environ), run))


def overlap_problem(saves: Path, exports: Path) -> str:
    """Return why saves and exports cannot have these directories, one line; empty if they can.

    Saves and exports give checkpoints the same names and replace the same
    ``latest_checkpointed_iteration.txt``. Either directory may lie in the other, but not in a
    checkpoint, which is removed as a whole. The file system is inspected, as through links and
    mounts two names may mean the same directory.
    """
    saves, exports = saves.absolute(), exports.absolute()
    advice = "give exports a directory of their own (--deadpool-persist-directory)"
    try:
        same = saves.samefile(exports)
    except OSError:  # a directory does not exist yet
        same = False
    try:
        real_saves, real_exports = _resolve(saves), _resolve(exports)
    except OSError as error:
        return f"--save {saves} or the directory of the run's exports ({exports}): {error}"
    if same or real_saves == real_exports:
        return f"--save {saves} is where the run's exports go ({exports}): {advice}"
    for inner, outer in ((real_saves, real_exports), (real_exports, real_saves)):
        if inner.is_relative_to(outer) and _CHECKPOINT.match(inner.relative_to(outer).parts[0]):
            return (
                f"--save {saves} and the directory of the run's exports ({exports}): one lies in a"
                f" checkpoint of the other; {advice}"
            )
    return ""


def _resolve(path: Path) -> Path:
    """Return ``path`` without links. Raises OSError for a cycle of links, which Path.resolve
    accepts from Python 3.13 on."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
    return path.resolve()


@dataclass(frozen=True)
class NewCheckpoint:
    """Files in ``temporary`` that are to become the checkpoint ``final`` of a run.

    ``is_current()``: whether the checkpoint still belongs to the run, called when all files are on
    the disk. ``invalidated``: paths of checkpoints that could not be loaded; this checkpoint may
    replace them.
    """

    temporary: Path
    final: Path
    restore: Restore
    run: RunDirectory
    run_id: str
    is_current: Callable[[], bool] = lambda: True
    invalidated: Collection[str] = ()

    def make_valid(self) -> Restore:
        """Sync the files, rename the directory, then enter it into ``latest.json``. Entries of
        newer iterations stay before it: an export may have overtaken an asynchronous save.

        ``temporary`` is ``final`` itself if a loop writes in place. Otherwise, if this run has
        given the name to a checkpoint before, that checkpoint stays: this request repeats an
        earlier request after a recovery. Any other checkpoint of that name is renamed to
        ``NAME.before-RUN_ID``. Raises DurableError. Runs in a worker thread.

        After a takeover the request is repeated, and the earlier coordinator may still be writing.
        """
        temporary, final = self.temporary, self.final
        with _as_durable_error(final):
            run_files.check_save(temporary, final)
            if temporary == final:
                check_checkpoint(final)
                _sync_all(final)  # Megatron does not sync common.pt and metadata.json
                self._require_current()
            elif not self._own_exists() or (str(final) in self.invalidated and temporary.is_dir()):
                self._give_name()
            self._note_name(_SAVED)
            sync(final.parent)
            if temporary != final:
                shutil.rmtree(temporary, ignore_errors=True)
            for unfinished in final.parent.glob(".iter_*.epoch*"):
                # Remove saves that a failure has interrupted. Saves of this epoch may be in
                # progress, and of later epochs too, if this epoch has been closed since.
                if _epoch_of(unfinished) < self.restore.generation.lineage:
                    shutil.rmtree(unfinished, ignore_errors=True)
            return self._enter_latest(replaces_same=True)

    def enter_loaded(self) -> Restore:
        """Enter a checkpoint that the program has loaded into ``latest.json``, without a change of
        its owner. Raises DurableError."""
        with _as_durable_error(self.final):
            return self._enter_latest(replaces_same=False)

    def _give_name(self) -> None:
        """Sync the files, note the name, and rename the directory."""
        temporary, final = self.temporary, self.final
        if not temporary.is_dir() and not self._own_exists():
            raise DurableError(f"{temporary} is not a directory")
        try:
            _prepare(temporary)
            self._require_current()
            # The check comes after the sync, as another coordinator may have made a checkpoint
            # valid in the meantime. Its name is noted, so that it counts as this run's, and stays.
            if final.exists() and (str(final) in self.invalidated or not self._is_own()):
                self._rename_existing()
            self._note_name(_SAVED)
            temporary.rename(final)
        except OSError:
            if not self._own_exists():
                raise

    def publish(self, *, may_be_pruned: bool = True) -> Restore:
        """Give an exported checkpoint its name, and enter it into ``latest.json``.

        ``may_be_pruned``: the export enters the run's list of exports before it gets its name. So
        it is pruned later even if a full disk keeps it out of ``latest.json``.

        If this run has given the name to a checkpoint before, that checkpoint stays, as it has the
        same iteration and content. Any other checkpoint of that name may belong to another run, or
        be torn or unfinished, and is an error. Raises DurableError. Runs in a worker thread.
        """
        temporary, final = self.temporary, self.final
        iteration = self.restore.generation.iteration
        with _as_durable_error(final):
            _prepare(temporary)
            if not self.is_current():
                raise DurableError("training has continued from an earlier state")
            if str(final) in self.invalidated and final.exists():
                self._rename_existing()
            if not final.exists():
                self._note_name(_EXPORTED)
                if may_be_pruned:
                    with contextlib.suppress(DurableError):  # a damaged list prunes nothing
                        _write_exports(self.run, [*_read_exports(self.run, final), str(final)])
                temporary.rename(final)
                sync(final.parent)
            elif self._is_own():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                raise DurableError(
                    f"{final} is there already and this run did not export it: it is left alone;"
                    " name another directory (deadpool persist RUN TO,"
                    " --deadpool-persist-directory)"
                )
            tracker = final.parent / _TRACKER
            if _tracked_iteration(tracker) < iteration:
                write_text(tracker, str(iteration), lasting=True)
            remove_unfinished(final.parent, self.run_id)
            return self._enter_latest(replaces_same=False)

    def _note_name(self, owner: str) -> None:
        """Append a line with the name to the run's file of names, and sync it. Only then may a
        checkpoint get the name."""
        self.run.check_own()
        written = self.temporary if self.temporary.is_dir() else self.final
        name = run_files.stored_path(self.final, self.run.path)
        line = f"{owner} {name} {run_files.fingerprint(written)}"
        if line in _noted_lines(self.run):
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        handle = os.open(self.run.named, flags, 0o644)
        try:
            # The first line feed ends a line that a crash may have cut short.
            os.write(handle, os.fsencode(f"\n{line}\n"))
            os.fsync(handle)
        finally:
            os.close(handle)

    def _is_own(self) -> bool:
        """Return whether the existing checkpoint got its name from this run, for either owner."""
        name = run_files.stored_path(self.final, self.run.path)
        entry = f"{name} {run_files.fingerprint(self.final)}"
        return not _noted_lines(self.run).isdisjoint({f"{_SAVED} {entry}", f"{_EXPORTED} {entry}"})

    def _own_exists(self) -> bool:
        """Return whether the checkpoint exists, and got its name from this run."""
        return self.final.exists() and self._is_own()

    def _rename_existing(self) -> None:
        """Rename the existing checkpoint, to a new name each time."""
        renamed = self.final.with_name(f"{self.final.name}.before-{self.run_id}")
        if renamed.exists():
            renamed = renamed.with_name(f"{renamed.name}-{secrets.token_hex(4)}")
        self.final.rename(renamed)

    def _enter_latest(self, *, replaces_same: bool) -> Restore:
        """Enter the checkpoint into ``latest.json``, and return its entry. The next start continues
        from the first usable entry. ``replaces_same``: put it before entries of the same
        iteration."""
        self.run.check_own()
        restore, latest = run_files.with_identity(self.restore), self.run.latest
        min_iteration = restore.generation.iteration + int(replaces_same)
        with _latest_lock:
            valid = run_files.still_valid(latest, restore)
            loadable = [entry for entry in valid if entry.path not in self.invalidated]
            newer = [entry for entry in loadable if entry.generation.iteration >= min_iteration]
            older = [entry for entry in loadable if entry not in newer]
            run_files.write_latest(latest, [*newer, restore, *older])
        return restore

    def _require_current(self) -> None:
        if not self.is_current():
            raise DurableError("its epoch was closed before all of it was on the disk")


def remove_unfinished(directory: Path, run_id: str, term: str = "0") -> None:
    """Remove a run's unfinished exports, which failed together with their coordinator, except those
    of ``term``.

    They are renamed first, so that a coordinator that was wrongly declared dead cannot publish
    them.
    """
    for unfinished in directory.glob(f"{run_files.EXPORT_PREFIX}{run_id}-*"):
        if not unfinished.name.startswith(f"{run_files.EXPORT_PREFIX}{run_id}-{term}."):
            renamed = run_files.unfinished_export(directory, run_id, secrets.token_hex(8))
            with contextlib.suppress(OSError):
                unfinished.rename(renamed)
                shutil.rmtree(renamed)


def exports_to_prune(exported: Sequence[str], keep: int, needed: Collection[str]) -> list[str]:
    """Return the exports (given oldest first) to remove so that ``keep`` exports are left; 0 keeps
    all. The newest export always stays, and so do ``needed`` exports, from which a run may
    resume."""
    excess = len(exported) - max(1, keep) if keep else 0
    return [path for path in exported[: max(0, excess)] if path not in needed]


def list_and_prune(
    run: RunDirectory, run_id: str, final: Path, keep: int, needed: Collection[str]
) -> None:
    """Enter a valid export into the run's list of exports and remove old exports. Raises
    DurableError."""
    with _as_durable_error(run.exported):
        exports = [*_read_exports(run, final), str(final)]
        # A checkpoint that the program has saved under the name of an export is not pruned.
        saves = "\n".join(line for line in _noted_lines(run) if line.startswith(_SAVED))
        stored = run_files.stored_path
        exports = [path for path in exports if f"{_SAVED} {stored(path, run.path)}" not in saves]
        pruned = exports_to_prune(exports, keep, {*needed, *_tracked_checkpoints(exports)})
        for path in map(Path, pruned):
            # The export is renamed first, so that no reader begins to load half of it.
            renamed = run_files.unfinished_export(path.parent, run_id, path.name)
            if run_files.is_checkpoint(path) and path.is_dir():
                path.rename(renamed)
                shutil.rmtree(renamed)
        _write_exports(run, [path for path in exports if path not in pruned])


def _read_exports(run: RunDirectory, final: Path) -> list[str]:
    """Return the existing exports that may be pruned, without ``final``."""
    try:
        paths = [str(run.path / path) for path in run_files.read_json(run.exported)["paths"]]
        return [path for path in paths if path != str(final) and Path(path).is_dir()]
    except FileNotFoundError:
        return []
    except (OSError, *DAMAGE) as error:
        raise DurableError(f"{run.exported} is damaged, nothing is pruned: {error}") from error


def _write_exports(run: RunDirectory, paths: Sequence[str]) -> None:
    stored = [run_files.stored_path(path, run.path) for path in paths]
    run_files.write_json(run.exported, {"paths": stored}, lasting=True)


def _noted_lines(run: RunDirectory) -> frozenset[str]:
    try:
        # Decoded as a path, since a crash may have cut a character, and a directory may have any
        # name.
        return frozenset(os.fsdecode(run.named.read_bytes()).split("\n"))
    except FileNotFoundError:
        return frozenset()


def _tracked_iteration(tracker: Path) -> int:
    """Return the iteration in a tracker file; -1 if there is no iteration, or no checkpoint of it
    any more."""
    try:
        number = int(tracker.read_text())
    except (FileNotFoundError, ValueError):
        return -1
    return number if (tracker.parent / f"iter_{number:07d}").is_dir() else -1


def _tracked_checkpoints(checkpoints: Sequence[str]) -> set[str]:
    """Return the checkpoints to which the tracker files next to these checkpoints point, as
    ``--load`` uses them."""
    folders = {Path(path).parent for path in checkpoints}
    return {str(folder / f"iter_{_tracked_iteration(folder / _TRACKER):07d}") for folder in folders}


def _epoch_of(unfinished: Path) -> int:
    """Return the epoch in the name of an unfinished save; the largest number for any other name, so
    that such a directory stays."""
    number = unfinished.suffix.removeprefix(".epoch")
    return int(number) if number.isdecimal() else sys.maxsize


def _prepare(temporary: Path) -> None:
    """Sync a new checkpoint, and give it the access rights of its parent directory."""
    check_checkpoint(temporary)
    _sync_all(temporary)
    temporary.chmod(temporary.parent.stat().st_mode & 0o755)


def _sync_all(temporary: Path) -> None:
    """Sync all files in parallel, as each may take a second."""
    with ThreadPoolExecutor(_SYNCS_AT_ONCE, thread_name_prefix="sync") as threads:
        for _ in threads.map(sync, sorted(temporary.rglob("*"))):
            pass
    sync(temporary)
