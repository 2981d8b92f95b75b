"""The run directory: the path of each file of a run, safe replacement of small JSON files, the
checkpoints for the next start, and the names of files that orders may write and remove.

Layout (contract between all processes of a run)::

    run.json  secret  coordinator.json  journal/  events.jsonl  final.json
    latest.json  nodes/<id>.json  logs/  checkpoints/  dump/  exports/  exported.json  named.txt
    saves.json  skeletons/  frozen/  launcher.lock  program/  datasets-ready

``latest.json`` has the valid checkpoints and dumps, the best first. A checkpoint is used only after
a check that it still exists.

Orders are authenticated, but control over one agent or one member must not give the power to
remove files on other hosts. So names are checked where an order is carried out: dumps lie in the
run directory, and files that are removed elsewhere have names that only this run uses.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deadpool_megatron
from deadpool_megatron import UserError, ownership
from deadpool_megatron.events import DAMAGE
from deadpool_megatron.file_systems import WRITTEN_MODE, write_once, write_text
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import FIELDS, Settings, SettingsError
from deadpool_megatron.vault.disk import extras_file
from deadpool_megatron.wire.forms import read, write

# The output of a node's processes, before it is copied: in the node's shared-memory directory.
LOGS = "logs"
SEGMENT_ROOT = Path("/dev/shm")
RUN_FILE = "run.json"
# Enough for logs, events and records of a short run.
_MIN_FREE_BYTES = 256 << 10
ENVIRONMENT_DIRECTORY = "DEADPOOL_RUN_DIR"
ENVIRONMENT_RUN_ID = "DEADPOOL_RUN_ID"
RUN_ID = re.compile(r"[0-9a-f]{8}")
EXPORT_PREFIX = ".export-"
# Created with the directory, before ``run.json``.
SUB_DIRECTORIES = ("journal", "nodes", "logs", "checkpoints", "dump")
# Other users may read a run directory, if the umask allows it, but never write to it, because
# orders and commands are read from its files.
DIRECTORY_MODE = 0o755
# Settings may have addresses that contain a password.
_RUN_MODE = 0o600
# Entries that ``latest.json`` keeps; older checkpoints remain on disk without an entry.
_MAX_VALID = 16
_INDEX = ".metadata"
# This file in a directory of checkpoints has the id of the run that has written there last.
_WRITER = "deadpool-writer"
# Few samples distinguish checkpoints, because a recovery waits while they are read.
_SHARDS, _SAMPLES, _SAMPLE_BYTES = 2, 8, 4096
_EXPORT_NAME = re.compile(r"\d{1,9}(\.[0-9a-f]{8})?\.\d{1,9}")
_GENERATION = re.compile(r"\d+-\d+")
_CHECKPOINT = re.compile(r"iter_\d+")


class RunDirectoryError(UserError):
    """The error of a directory that is no run directory, or is damaged; the message is one line."""


@dataclass(frozen=True)
class RunInfo:
    """Content of ``run.json``: fixed until the run is started again, the same on every node.

    ``check_only``: the run ends after the check of its nodes. ``finished``: iterations finished
    before this start; ``from_scratch``: the run may begin at iteration 0 if their state is lost.
    ``restore``: the states to begin from, the best first. ``ended_term`` and ``ended_epoch``: the
    newest term and epoch of earlier starts, whose processes have all ended. ``directory``: the
    working directory of the start; ``environment``: its variables that change computed numbers.
    """

    run_id: str
    world_size: int
    nodes: int
    spares: int
    nproc_per_node: int
    command: tuple[str, ...]
    settings: Settings
    restore: tuple[Restore, ...] = ()
    check_only: bool = False
    ended_term: int = 0
    ended_epoch: int = 0
    finished: int = 0
    from_scratch: bool = False
    directory: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with the version that writes it."""
        return {"version": deadpool_megatron.__version__, **write(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RunInfo:
        """Invert :meth:`to_dict`. Raises KeyError, TypeError, ValueError or SettingsError."""
        if not RUN_ID.fullmatch(str(values["run_id"])):  # part of paths that are removed later
            raise ValueError(f"{values['run_id']!r} is no run id")
        info: RunInfo = read(RunInfo, values)
        return info


def member_log_name(node: int, local_rank: int, incarnation: int) -> str:
    """Return the name of a member's log."""
    return f"node{node}-rank{local_rank}-{incarnation}"


class RunDirectory:
    """Paths and small files of one run; thread-safe. The path is resolved once, so that a link that
    changes later does not lead this process to another run. ``run_id``: the run to which this
    process belongs, set only in processes of the run. They ignore the files of another run that has
    taken over the directory."""

    def __init__(self, path: Path) -> None:
        self.path = path = Path(os.path.realpath(path))
        self.run_id = ""
        self._checked_mark: tuple[int, ...] = ()
        self.events = path / "events.jsonl"  # the coordinator is the only writer
        self.final = path / "final.json"  # written once, when the run is over
        self.journal = path / "journal"
        self.coordinator = path / "coordinator.json"  # its address and pid
        self.logs = path / "logs"  # the output of processes, a file for each
        # Generations that vaults write when a run ends for lack of nodes.
        self.dump = path / "dump"
        self.latest = path / "latest.json"  # newest durable checkpoint or dump
        # Checkpoints written in the background, unless a setting names another directory, and the
        # list of them, which is needed to prune old checkpoints.
        self.exports = path / "exports"
        self.exported = path / "exported.json"
        self.templates = path / "skeletons"  # each role's template of a checkpoint
        self.frozen = path / "frozen"  # weights that no iteration changes, if they are large
        # The directory of the program's own saves, noted before the first save.
        self.saves = path / "saves.json"
        # Every checkpoint that this run has named, and its requester.
        self.named = path / "named.txt"
        self.launcher_lock = path / "launcher.lock"  # held by ``deadpool run``
        # The parameter kinds of all roles; written when role 0 has made the data's index files.
        self.built = path / "datasets-ready"
        # A file for each agent that has written the slots that an earlier run left on its host.
        self.resuming = path / "resuming"

    def node(self, node: int) -> Path:
        """Return the path of a node's process listing."""
        return self.path / "nodes" / f"{node}.json"

    def log(self, name: str) -> Path:
        """Return the path of a log: ``node0-agent``, ``node0-rank1-2``, ``node0-standby``, ..."""
        return self.logs / f"{name}.log"

    def segments(self, run_id: str, node: int) -> Path:
        """Return the shared-memory directory of a node."""
        return segment_root(run_id) / f"node{node}"

    def make(self) -> None:
        """Create the directory, for this user alone; an existing directory may be readable by other
        users.

        Raises OwnershipError when another user owns the directory or may write to it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        ownership.check_directory(self.path)

    def create(self, info: RunInfo) -> bool:
        """Create all sub-directories and ``run.json``. Return False if another process has created
        ``run.json`` before, so that the directory belongs to its run. Raises OwnershipError as
        :meth:`make` does.
        """
        self.make()
        for name in SUB_DIRECTORIES:
            (self.path / name).mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        self._check_owner()
        text = json.dumps(info.to_dict(), indent=1) + "\n"
        # A full disk is reported now, rather than by each process at its first write.
        return write_once(self.path / RUN_FILE, text.encode(), _RUN_MODE, _MIN_FREE_BYTES)

    def replace_run(self, info: RunInfo) -> None:
        """Replace ``run.json`` for a new start of the run. Raises OSError."""
        write_json(self.path / RUN_FILE, info.to_dict(), lasting=True, mode=_RUN_MODE)

    def _check_owner(self) -> None:
        """Check the owner of the directory and of the sub-directories from which decisions are
        read."""
        for path in (self.path, self.journal, self.node(0).parent):
            ownership.check_directory(path)

    def read_run(self, *, only_to_show: bool = False) -> RunInfo:
        """Return the content of ``run.json``. Raises RunDirectoryError when this is not a run
        directory, and, unless ``only_to_show``, OwnershipError when others could have written it.
        """
        if not only_to_show:
            self._check_owner()
        try:
            values = read_json(self.path / RUN_FILE)
            _check_version(self.path / RUN_FILE, values)
            return RunInfo.from_dict(values)
        except FileNotFoundError as error:
            raise RunDirectoryError(f"{self.path} is not a run directory (no run.json)") from error
        except OSError as error:
            raise RunDirectoryError(f"{self.path / 'run.json'}: {error.strerror}") from error
        except (*DAMAGE, SettingsError) as error:
            raise RunDirectoryError(f"{self.path / 'run.json'} is damaged: {error}") from error

    def check_own(self) -> None:
        """Raise OSError if another run has taken over the directory of this process's run."""
        if not self.run_id:
            return
        try:
            status = (self.path / RUN_FILE).stat()
            # The time is compared too, as a new file may have the inode of an old file.
            mark = (status.st_dev, status.st_ino, status.st_mtime_ns)
            if mark == self._checked_mark:
                return
            owner = str(read_json(self.path / RUN_FILE).get("run_id"))
        except (OSError, ValueError):
            return  # the directory is removed, or briefly out of reach
        if owner != self.run_id:
            raise OSError(errno.ESTALE, f"it is the directory of run {owner} now", str(self.path))
        self._checked_mark = mark

    def has_final(self) -> bool:
        """Return whether there is a result; False while the directory is out of reach."""
        try:
            self.check_own()
            return self.final.exists()
        except OSError:
            return False

    def read_final(self) -> dict[str, Any]:
        """Return the result of the run: all of ``final.json``, with ``exit_status``, ``reason`` and
        ``iterations``. Raises RunDirectoryError when that cannot be read.
        """
        try:
            self.check_own()
            values = read_json(self.final)
            for name, kind in (("exit_status", int), ("reason", str), ("iterations", int)):
                if not isinstance(values[name], kind):
                    raise TypeError(f"{name} is {values[name]!r:.40}")
            return values
        except OSError as error:
            raise RunDirectoryError(f"{self.final}: {error.strerror}") from error
        except DAMAGE as error:
            raise RunDirectoryError(f"{self.final} is damaged: {error!r}") from error

    def node_listings(self) -> dict[int, dict[str, Any]]:
        """Return all process listings that can be read, by node id."""
        listings = {}
        for path in sorted((self.path / "nodes").glob("*.json")):
            try:
                self.check_own()
                listings[int(path.stem)] = _listing(path)
            except (OSError, *DAMAGE):
                continue  # it is being replaced, or its node was killed before the first write
        return listings


def _check_version(path: Path, values: Mapping[str, Any]) -> None:
    """Raise RunDirectoryError for settings of another version, as these are no damage."""
    settings = values.get("settings")
    known = FIELDS.keys()
    if not isinstance(settings, dict) or not (unknown := sorted(settings.keys() - known)):
        return
    version = values.get("version")
    raise RunDirectoryError(
        f"{path} was written by another version of deadpool"
        f"{f', {version}' if isinstance(version, str) else ''}: use that one; this one"
        f" ({deadpool_megatron.__version__}) does not know the settings {', '.join(unknown[:5])}"
    )


def _listing(path: Path) -> dict[str, Any]:
    """Return a process listing. Raises as :func:`read_json` does, KeyError if it lists no agent, or
    TypeError for an invalid process id."""
    values = read_json(path)
    started = values.get("started", {})
    numbers = [values["agent"], *(ticks or 0 for ticks in dict(started).values())]
    if not all(isinstance(number, int) for number in numbers) or not all(map(str.isdigit, started)):
        raise TypeError(f"{path} names what is no process")
    return values


def address_in(text: str) -> tuple[str, int] | None:
    """Return the address of the coordinator in its ``coordinator.json``; None if it has no valid
    address."""
    try:
        values = json.loads(text)
        return str(values["host"]), int(values["port"])
    except DAMAGE:
        return None


def slots_are_kept(run: RunDirectory) -> bool:
    """Return whether the run ended with a result, but kept its slots in memory for another
    start."""
    try:
        return bool(read_json(run.final).get("slots_kept", False))
    except (OSError, ValueError):
        return False


def segment_root(run_id: str) -> Path:
    """Return the shared-memory directory of a run on this host.

    All users of a host see the name, and may create a directory of that name on other hosts of the
    run. On such a host the name gets an unpredictable ending, and the oldest directory of this user
    with the name is the run's.
    """
    root = SEGMENT_ROOT / f"deadpool-{run_id}"
    own = sorted(filter(ownership.is_private, SEGMENT_ROOT.glob(f"{root.name}*")))
    if not own and ownership.is_taken(root):
        return root.with_name(f"{root.name}.{time.time_ns():x}")
    return own[0] if own else root


def unfinished_export(directory: Path, run_id: str, name: str) -> Path:
    """Return the directory of an export until it is complete."""
    return directory / f"{EXPORT_PREFIX}{run_id}-{name}"


def write_json(
    path: Path, values: Mapping[str, Any], *, lasting: bool = False, mode: int = WRITTEN_MODE
) -> None:
    """Replace ``path`` so that a reader sees the old or the new object, never a part of it.
    ``lasting``: wait for the disk, so that the new object survives a power failure; otherwise that
    may leave an empty file or the old file."""
    write_text(path, json.dumps(values, indent=1) + "\n", lasting=lasting, mode=mode)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises OSError, or ValueError for any other content."""
    with os.fdopen(ownership.open_regular(path)) as file:
        values = json.loads(file.read())
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values


def stored_path(path: str | Path, run: Path) -> str:
    """Return a path as the files of a run store it. A path in the run directory is stored as a
    relative path, so that it stays right when the run directory is moved or copied."""
    real = Path(os.path.realpath(path))
    return str(real.relative_to(run) if real.is_relative_to(run) else path)


def read_valid(latest: Path) -> tuple[Restore, ...]:
    """Return the noted checkpoints. Raises OSError, or ValueError when the file is damaged."""
    try:
        valid = map(Restore.from_dict, read_json(latest)["valid"])
        return tuple(replace(r, path=r.path and str(latest.parent / r.path)) for r in valid)
    except DAMAGE as error:
        raise ValueError(f"{latest} is damaged: {error!r}") from error


def write_latest(latest: Path, valid: Sequence[Restore]) -> None:
    """Write the checkpoints. The next start continues from the first that it can use. Raises
    OSError."""
    parent = latest.parent
    stored = [replace(r, path=r.path and stored_path(r.path, parent)) for r in valid[:_MAX_VALID]]
    write_json(latest, {"valid": [restore.to_dict() for restore in stored]}, lasting=True)


def still_valid(latest: Path, without: Restore) -> list[Restore]:
    """Return the noted checkpoints that exist, except ``without``; none if the file is damaged."""
    try:
        known = read_valid(latest)
    except (FileNotFoundError, ValueError):
        return []
    return [r for r in known if r.path not in ("", without.path) and is_there(r)]


def is_there(restore: Restore) -> bool:
    """Return whether the checkpoint or dump still exists with the noted content; True when that
    cannot be read now."""
    try:
        names = [path.name for path in Path(restore.path).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    # A user's own loop may write another format than torch_dist, with another index or none.
    has_shards = any(name.endswith(".distcp") for name in names)
    if restore.kind != "dump" and _INDEX not in names and (not names or has_shards):
        return False
    try:
        return restore.identity in ("", _identity_at(restore))
    except (OSError, ValueError):
        return True


def with_identity(restore: Restore) -> Restore:
    """Return ``restore`` with an identity that distinguishes the present content of its path from
    later content, if that can be read."""
    if not restore.identity and restore.kind != "initial":
        with contextlib.suppress(OSError, ValueError):
            return replace(restore, identity=_identity_at(restore))
    return restore


def _identity_at(restore: Restore) -> str:
    """Return the identity of the present content of the path: the run id of a dump, or the
    fingerprint of a checkpoint. Raises OSError or ValueError."""
    path = Path(restore.path)
    if restore.kind != "dump":
        return fingerprint(path)
    above = path.parent if path.name == "dump" else path.parent.parent
    return str(read_json(above / RUN_FILE).get("run_id"))


def fingerprint(path: Path) -> str:
    """Return a digest of names, sizes and samples of the first files of a checkpoint; a copy has
    the same digest. Raises OSError."""
    digest = hashlib.sha256()
    shards = sorted(path.glob("*.distcp")) or sorted(filter(Path.is_file, path.rglob("*")))
    for shard in shards[:_SHARDS]:
        with open(shard, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            digest.update(f"{shard.name} {nbytes} ".encode())
            for at in range(0, nbytes, max(_SAMPLE_BYTES, nbytes // _SAMPLES)):
                file.seek(at)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def take_saves(run: RunDirectory, directory: Path) -> None:
    """Note in the run that its checkpoints are in ``directory`` from now on, and in ``directory``
    that this run is its writer. The first note in the run stays, because the time of that file
    counts. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / _WRITER, run.read_run().run_id)
    if not run.saves.exists():
        write_json(run.saves, {"directory": stored_path(directory, run.path)})


def found_in(saves: Path) -> list[Restore]:
    """Return Megatron's complete checkpoints, the newest first, in the directory that ``saves``
    names. Only checkpoints that were written after that note, with the index last, are returned,
    and none if another run has written to the directory since. They may not have been reported, so
    their lineage is unknown.
    """
    checkpoints = list[Restore]()
    try:
        since = saves.stat().st_mtime
        directory = saves.parent / read_json(saves)["directory"]
        if (directory / _WRITER).read_text() != read_json(saves.parent / RUN_FILE)["run_id"]:
            return []
        for path in directory.glob("iter_[0-9]*"):
            times = [shard.stat().st_mtime for shard in path.glob("*.distcp")]
            is_whole = (path / _INDEX).exists() and (path / "metadata.json").exists()
            is_whole = is_whole and not extras_file.lacks_some(path)
            if is_whole and since <= max(times) <= (path / _INDEX).stat().st_mtime:
                generation = Generation(0, int(path.name.removeprefix("iter_")))
                checkpoints.append(Restore("durable", generation, "save", str(path)))
    except (OSError, *DAMAGE):
        pass  # the noted checkpoints remain in any case
    return sorted(checkpoints, key=lambda restore: restore.generation.iteration, reverse=True)


def missing_paths(valid: Sequence[Restore]) -> frozenset[str]:
    """Return the paths whose checkpoints no longer exist. May block as long as a file system
    does."""
    with ThreadPoolExecutor(_MAX_VALID) as threads:
        answers = list(threads.map(is_there, valid))
    return frozenset(r.path for r, exists in zip(valid, answers, strict=True) if not exists)


class OutsideError(ValueError):
    """The error of a path or name that no order of this run uses; the message is one line."""


def export_name(name: str) -> str:
    """Check the name of an export, which becomes part of file names. Raises OutsideError."""
    if not _EXPORT_NAME.fullmatch(name):
        raise OutsideError(f"{name[:80]!r} is not the name of an export")
    return name


def export_directory(directory: str, name: str) -> Path:
    """Check the directory of an unfinished export, which must have this name; the user may choose
    any parent directory. Raises OutsideError."""
    path = Path(directory)
    if not path.is_absolute() or path.name != name:
        raise OutsideError(f"{directory!r} is not where this run writes {name}")
    return path


def dump_directory(directory: str, run: RunDirectory) -> str:
    """Check the directory in which a vault dumps generations. Raises OutsideError."""
    path = Path(directory)
    above = path.parent if _GENERATION.fullmatch(path.name) else path
    # The nodes may know the same directory by different links.
    if above != run.dump and os.path.realpath(above) != os.path.realpath(run.dump):
        raise OutsideError(f"{directory!r} is not in the dump directory of this run, {run.dump}")
    return directory


def check_save(temporary: Path, final: Path) -> None:
    """Check the path of a written save, and its final name. Raises OutsideError."""
    if temporary == final:
        return  # the save was written in place: no file is moved or removed
    epoch = temporary.name.removeprefix(f".{final.name}.epoch")
    if (
        temporary.parent != final.parent
        or not _CHECKPOINT.fullmatch(final.name)
        or not (epoch.isdigit() and temporary.name == f".{final.name}.epoch{epoch}")
    ):
        raise OutsideError(f"{temporary} is not where a save to {final} is written")


def is_checkpoint(path: Path) -> bool:
    """Return whether a path has the name of a checkpoint, which may be pruned as a whole."""
    return path.is_absolute() and bool(_CHECKPOINT.fullmatch(path.name))
