"""Making a durable checkpoint valid: one rename, after everything in it has reached the disk.

Two kinds: what the training processes save, and what is exported in the background, whose writers
know nothing of each other. By ``latest_checkpointed_iteration.txt`` Megatron finds the newest of a
directory.

The directory that a checkpoint goes to may be older than the run. So the run notes each name before
it gives it: what has the name already is this run's own, of an earlier request, or it is of another
run, or torn, and then neither fallen back to nor pruned.
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

# Who has a checkpoint: the program, by a save of its own, or the exports, which are pruned.
_SAVED = "saved"
_EXPORTED = "exported"
# What either may remove as a whole: a checkpoint, whole or unfinished.
_CHECKPOINT = re.compile(r"\.?iter_\d+|\.export-")
# A save and an export may become valid at once, each in a thread.
_pointing = threading.Lock()
_SYNCS_AT_ONCE = 16
_TRACKER = "latest_checkpointed_iteration.txt"


class DurableError(Exception):
    """The checkpoint did not become valid; one clear line."""


@contextlib.contextmanager
def _in_a_line(place: Path) -> Iterator[None]:
    """``place``: what is being written, for errors that name no file, as that of a full disk."""
    try:
        yield
    except (run_files.OutsideError, OwnershipError) as error:
        raise DurableError(str(error)) from error
    except OSError as error:
        raise DurableError(f"{error.filename or place}: {error.strerror}") from error


def export_directory(settings: Settings, run: RunDirectory) -> Path:
    """Return where the exports of a run go, unless somebody who asks for one names another
    place."""
    return Path(settings.persist_directory) if settings.persist_directory else run.exports


def saves_refusal(saves: str | Path | None, environ: Mapping[str, str]) -> str:
    """Return why the run that a process with this environment belongs to cannot save to ``saves``,
    one line; empty if it can, or if this is no process of a run."""
    run_directory = environ.get(run_files.ENVIRONMENT_DIRECTORY)
    if not saves or run_directory is None:
        return ""
    run = RunDirectory(Path(run_directory))
    return overlap(Path(saves), export_directory(Settings.from_environment(environ), run))


def overlap(saves: Path, exports: Path) -> str:
    """Return why saves and exports cannot have these directories, one line; empty if they can.

    Both give the same names and replace the same ``latest_checkpointed_iteration.txt``. One may lie
    in the other, but not within one of its checkpoints, which is removed as a whole. Looks at the
    file system: links and mounts may make one directory of two names.
    """
    saves, exports = saves.absolute(), exports.absolute()
    advice = "give exports a directory of their own (--deadpool-persist-directory)"
    try:
        same = saves.samefile(exports)
    except OSError:  # one is not there yet
        same = False
    try:
        real_saves, real_exports = _resolved(saves), _resolved(exports)
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


def _resolved(path: Path) -> Path:
    """Return ``path`` without links; raises OSError for links in a circle, which Path itself lets
    pass from Python 3.13 on."""
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
    return path.resolve()


@dataclass(frozen=True)
class NewCheckpoint:
    """The files in ``temporary`` are to be the checkpoint ``final`` of a run.

    ``counts()``: whether it still belongs to the run, asked when all is on the disk. ``struck``:
    paths of checkpoints that could not be loaded, for which this one is no repetition.
    """

    temporary: Path
    final: Path
    restore: Restore
    run: RunDirectory
    run_id: str
    counts: Callable[[], bool] = lambda: True
    struck: Collection[str] = ()

    def make_valid(self) -> Restore:
        """Sync the files, rename the directory, then enter it into ``latest.json``, behind what is
        newer there: an export may have overtaken a save that was asynchronous.

        ``temporary`` may be ``final`` itself, where a loop writes in place. Otherwise a checkpoint
        of the same name is left alone if this run gave it the name: an earlier request made it
        valid, and the one at hand repeats it after a recovery. Anybody else's is set aside, as
        ``NAME.before-RUN_ID``. Raises DurableError. Runs in a worker thread.

        A coordinator that takes over is asked again, and the one before may still be at it.
        """
        temporary, final = self.temporary, self.final
        with _in_a_line(final):
            run_files.check_save(temporary, final)
            if temporary == final:
                check_checkpoint(final)
                _sync_all(final)  # Megatron has left common.pt and metadata.json to the system
                self._require()
            elif not self._has_named() or (str(final) in self.struck and temporary.is_dir()):
                self._give_name()
            self._note(_SAVED)
            sync(final.parent)
            if temporary != final:
                shutil.rmtree(temporary, ignore_errors=True)
            for leftover in final.parent.glob(".iter_*.epoch*"):
                # Of saves that a failure interrupted. Those of this epoch and of later ones may be
                # under way: it may have been closed meanwhile.
                if _epoch_of(leftover) < self.restore.generation.lineage:
                    shutil.rmtree(leftover, ignore_errors=True)
            return self._point_at(replaces_equal=True)

    def remember(self) -> Restore:
        """Enter one that the program has loaded into ``latest.json``. It stays whose it is. Raises
        DurableError."""
        with _in_a_line(self.final):
            return self._point_at(replaces_equal=False)

    def _give_name(self) -> None:
        temporary, final = self.temporary, self.final
        if not temporary.is_dir() and not self._has_named():
            raise DurableError(f"{temporary} is not a directory")
        try:
            _take(temporary)
            self._require()
            # Asked after the sync: what another coordinator has made valid meanwhile stays. It
            # notes the name before it gives it.
            if final.exists() and (str(final) in self.struck or not self._is_named()):
                self._set_aside()
            self._note(_SAVED)
            temporary.rename(final)
        except OSError:
            if not self._has_named():
                raise

    def publish(self, *, may_be_pruned: bool = True) -> Restore:
        """Give an exported checkpoint its name, and enter it into ``latest.json``.

        ``may_be_pruned``: it is entered into the run's list, before it gets its name: one that is
        there but could not be pointed at, on a full disk, is pruned as well.
        A checkpoint that this run gave the name already stays: of the same iteration, it holds the
        same. Raises DurableError, also where anybody else's has the name: it may be of another run,
        or torn, or just being written. Runs in a worker thread.
        """
        temporary, final = self.temporary, self.final
        iteration = self.restore.generation.iteration
        with _in_a_line(final):
            _take(temporary)
            if not self.counts():
                raise DurableError("training has continued from an earlier state")
            if str(final) in self.struck and final.exists():
                self._set_aside()
            if not final.exists():
                self._note(_EXPORTED)
                if may_be_pruned:
                    with contextlib.suppress(DurableError):  # of a damaged list nothing is pruned
                        _list(self.run, [*_listed(self.run, final), str(final)])
                temporary.rename(final)
                sync(final.parent)
            elif self._is_named():
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                raise DurableError(
                    f"{final} is there already and this run did not export it: it is left alone;"
                    " name another directory (deadpool persist RUN TO,"
                    " --deadpool-persist-directory)"
                )
            tracker = final.parent / _TRACKER
            if _newest_by(tracker) < iteration:
                write_text(tracker, str(iteration), lasting=True)
            remove_unfinished(final.parent, self.run_id)
            return self._point_at(replaces_equal=False)

    def _note(self, who: str) -> None:
        """One line more, on the disk before anything gets the name."""
        self.run.check_own()
        written = self.temporary if self.temporary.is_dir() else self.final
        name = run_files.noted(self.final, self.run.path)
        line = f"{who} {name} {run_files.fingerprint(written)}"
        if line in _named(self.run):
            return
        how = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        handle = os.open(self.run.named, how, 0o644)
        try:
            # A line of its own even after one that a crash has cut short.
            os.write(handle, os.fsencode(f"\n{line}\n"))
            os.fsync(handle)
        finally:
            os.close(handle)

    def _is_named(self) -> bool:
        """Return whether what is there got its name from this run, for whomever."""
        name = f"{run_files.noted(self.final, self.run.path)} {run_files.fingerprint(self.final)}"
        ours = {f"{_SAVED} {name}", f"{_EXPORTED} {name}"}
        return not _named(self.run).isdisjoint(ours)

    def _has_named(self) -> bool:
        """Return whether the checkpoint is there, and has its name from this run."""
        return self.final.exists() and self._is_named()

    def _set_aside(self) -> None:
        """Out of the way of what gets the name. One set aside before it is not in the way."""
        aside = self.final.with_name(f"{self.final.name}.before-{self.run_id}")
        if aside.exists():
            aside = aside.with_name(f"{aside.name}-{secrets.token_hex(4)}")
        self.final.rename(aside)

    def _point_at(self, *, replaces_equal: bool) -> Restore:
        """Have the next start continue from it, unless from something newer; return it as noted."""
        self.run.check_own()
        restore, latest = run_files.identified(self.restore), self.run.latest
        iteration = restore.generation.iteration
        least = iteration + 1 if replaces_equal else iteration
        with _pointing:
            valid = run_files.still_valid(latest, restore)
            left = [one for one in valid if one.path not in self.struck]
            newer = [one for one in left if one.generation.iteration >= least]
            older = [one for one in left if one not in newer]
            run_files.point_at(latest, [*newer, restore, *older])
        return restore

    def _require(self) -> None:
        if not self.counts():
            raise DurableError("its epoch was closed before all of it was on the disk")


def remove_unfinished(directory: Path, run_id: str, term: str = "0") -> None:
    """Of exports of a run that a failure ended together with their coordinator; none of ``term``.

    Their names go first: a coordinator that was only thought dead must not publish one meanwhile.
    """
    for left in directory.glob(f"{run_files.EXPORT_PREFIX}{run_id}-*"):
        if not left.name.startswith(f"{run_files.EXPORT_PREFIX}{run_id}-{term}."):
            doomed = run_files.unfinished_export(directory, run_id, secrets.token_hex(8))
            with contextlib.suppress(OSError):
                left.rename(doomed)
                shutil.rmtree(doomed)


def to_prune(exported: Sequence[str], keep: int, needed: Collection[str]) -> list[str]:
    """Return which of the exports (oldest first) may go so that ``keep`` are left; 0 keeps all. The
    newest stays in any case, and so does what somebody would go back to."""
    spare = len(exported) - max(1, keep) if keep else 0
    return [path for path in exported[: max(0, spare)] if path not in needed]


def remember_and_prune(
    run: RunDirectory, run_id: str, final: Path, keep: int, needed: Collection[str]
) -> None:
    """Enter a valid export into the run's list and remove old ones. Raises DurableError."""
    with _in_a_line(run.exported):
        named = _named(run)
        listed = [*_listed(run, final), str(final)]
        # What the program itself saved under such a name is its own.
        saved = "\n".join(one for one in named if one.startswith(_SAVED))
        noted = run_files.noted
        listed = [one for one in listed if f"{_SAVED} {noted(one, run.path)}" not in saved]
        gone = to_prune(listed, keep, {*needed, *_tracked(listed)})
        for path in map(Path, gone):
            # Its name goes first: nobody must begin to load half of it.
            doomed = run_files.unfinished_export(path.parent, run_id, path.name)
            if run_files.is_checkpoint(path) and path.is_dir():
                path.rename(doomed)
                shutil.rmtree(doomed)
        _list(run, [path for path in listed if path not in gone])


def _listed(run: RunDirectory, final: Path) -> list[str]:
    """The exports that may be pruned, without ``final`` and what is not there (any more)."""
    try:
        listed = [str(run.path / path) for path in run_files.read_json(run.exported)["paths"]]
        return [path for path in listed if path != str(final) and Path(path).is_dir()]
    except FileNotFoundError:
        return []
    except (OSError, *DAMAGE) as error:
        raise DurableError(f"{run.exported} is damaged, nothing is pruned: {error}") from error


def _list(run: RunDirectory, paths: Sequence[str]) -> None:
    noted = [run_files.noted(one, run.path) for one in paths]
    run_files.write_json(run.exported, {"paths": noted}, lasting=True)


def _named(run: RunDirectory) -> frozenset[str]:
    try:
        # As bytes: a crash may have cut a character in two, and a directory any name.
        return frozenset(os.fsdecode(run.named.read_bytes()).split("\n"))
    except FileNotFoundError:
        return frozenset()


def _newest_by(tracker: Path) -> int:
    """Iteration of what it names; -1 for nothing, or for what somebody has removed."""
    try:
        number = int(tracker.read_text())
    except (FileNotFoundError, ValueError):
        return -1
    return number if (tracker.parent / f"iter_{number:07d}").is_dir() else -1


def _tracked(checkpoints: Sequence[str]) -> set[str]:
    """Return what the trackers in the directories of these checkpoints name: ``--load`` asks for
    it."""
    folders = {Path(path).parent for path in checkpoints}
    return {str(one / f"iter_{_newest_by(one / _TRACKER):07d}") for one in folders}


def _epoch_of(unfinished: Path) -> int:
    """Of the epoch that it was saved in; no name of ours is of none that ever ends."""
    number = unfinished.suffix.removeprefix(".epoch")
    return int(number) if number.isdecimal() else sys.maxsize


def _take(temporary: Path) -> None:
    """Have on the disk what is to get a name, and open to whoever may enter the directory above."""
    check_checkpoint(temporary)
    _sync_all(temporary)
    temporary.chmod(temporary.parent.stat().st_mode & 0o755)


def _sync_all(temporary: Path) -> None:
    """Side by side: where it takes a second for each, they are told to the file system at once."""
    with ThreadPoolExecutor(_SYNCS_AT_ONCE, thread_name_prefix="sync") as threads:
        for _ in threads.map(sync, sorted(temporary.rglob("*"))):
            pass
    sync(temporary)
