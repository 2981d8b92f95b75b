"""The run directory: the path of each file of a run, safe replacement of small JSON files, the
checkpoints for the next start, and the names that an order may have written and removed.

Layout (contract between all processes of a run)::

    run.json  secret  coordinator.json  journal/  events.jsonl  final.json
    latest.json  nodes/<id>.json  logs/  checkpoints/  dump/  exports/  exported.json  named.txt
    saves.json  skeletons/  frozen/  launcher.lock  program/  datasets-ready

``latest.json`` has the valid checkpoints and dumps, the best first. Before any of them is used, a
check shows that it still exists.

Orders are sent under a MAC, but control over one agent or one member must not give control over
removals on other hosts. So names are checked where an order is carried out: dumps lie in the run
directory, and files that are removed elsewhere have names that only this run uses.
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
from dataclasses import dataclass, replace
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

# In the directory of a node in shared memory: the output of its processes, before it is copied.
LOGS = "logs"
SEGMENT_ROOT = Path("/dev/shm")
RUN_FILE = "run.json"
# Enough for logs, events and records of a short run.
_MIN_FREE_BYTES = 256 << 10
ENVIRONMENT_DIRECTORY = "DEADPOOL_RUN_DIR"
ENVIRONMENT_RUN_ID = "DEADPOOL_RUN_ID"
RUN_ID = re.compile(r"[0-9a-f]{8}")
EXPORT_PREFIX = ".export-"
# Made with the directory, before it has a ``run.json``.
SUB_DIRECTORIES = ("journal", "nodes", "logs", "checkpoints", "dump")
# Other users may read a run directory, where the umask lets them, but never write to it, because
# the contents of its files are carried out.
DIRECTORY_MODE = 0o755
# Settings may have addresses that contain a password.
_RUN_MODE = 0o600
# Entries that ``latest.json`` keeps; older checkpoints remain on disk without an entry.
_MAX_VALID = 16
_INDEX = ".metadata"
# In the directory of checkpoints: the id of the run that has written there last.
_WRITER = "deadpool-writer"
# The samples that distinguish checkpoints are few, because a recovery waits for their read.
_SHARDS, _SAMPLES, _SAMPLE_BYTES = 2, 8, 4096
_EXPORT_NAME = re.compile(r"\d{1,9}(\.[0-9a-f]{8})?\.\d{1,9}")
_GENERATION = re.compile(r"\d+-\d+")
_CHECKPOINT = re.compile(r"iter_\d+")


class RunDirectoryError(UserError):
    """The error of a directory that is no run directory, or is damaged; one clear line."""


@dataclass(frozen=True)
class RunInfo:
    """Content of ``run.json``: fixed until the run is started again, the same on every node.

    ``check_only``: the run ends after the check of its nodes. ``finished``: iterations finished
    before this start; ``from_scratch``: it may begin again if nothing is left of them.
    ``restore``: the states to begin from, the best first.
    ``ended_term`` and ``ended_epoch``: the newest of earlier starts, all of whose processes have
    ended. ``directory``: the working directory of the start.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, with the version that writes it."""
        return {"version": deadpool_megatron.__version__, **write(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RunInfo:
        """Invert :meth:`to_dict`. Raises KeyError, TypeError, ValueError or SettingsError."""
        if not RUN_ID.fullmatch(str(values["run_id"])):  # it becomes part of a path that is removed
            raise ValueError(f"{values['run_id']!r} is no run id")
        info: RunInfo = read(RunInfo, values)
        return info


def member_log_name(node: int, local_rank: int, incarnation: int) -> str:
    """Return the name of a member's log."""
    return f"node{node}-slot{local_rank}-{incarnation}"


class RunDirectory:
    """Paths and small files of one run; thread-safe. The path is resolved once: a link that changes
    later does not lead this process to another run. ``run_id``: the run that this process belongs
    to, set by its own processes; files of another run that has taken over the directory do not
    count."""

    def __init__(self, path: Path) -> None:
        self.path = path = Path(os.path.realpath(path))
        self.run_id = ""
        self._known: tuple[int, ...] = ()
        self.events = path / "events.jsonl"  # the coordinator is the only writer
        self.final = path / "final.json"  # written once, when the run is over
        self.journal = path / "journal"
        self.coordinator = path / "coordinator.json"  # its address and pid
        self.logs = path / "logs"  # the output of processes, a file for each
        # Generations that vaults write when a run ends for lack of nodes.
        self.dump = path / "dump"
        self.latest = path / "latest.json"  # newest durable checkpoint or dump
        # Checkpoints written in the background, unless a setting names another directory; and their
        # list, by which a new checkpoint prunes its predecessors.
        self.exports = path / "exports"
        self.exported = path / "exported.json"
        self.templates = path / "skeletons"  # each role's additions to a checkpoint
        self.frozen = path / "frozen"  # weights that no iteration changes, if they are large
        # Names the directory of the program's own saves, from before the first save.
        self.saves = path / "saves.json"
        # Every checkpoint that this run has named, and its requester (see durable.py).
        self.named = path / "named.txt"
        self.launcher_lock = path / "launcher.lock"  # held by the ``deadpool run`` that uses it
        # Has the parameter kinds of all roles; written once role 0 has made the data's index files.
        self.built = path / "datasets-ready"
        # A file for each agent that has written the slots that an earlier run left on its host.
        self.resuming = path / "resuming"

    def node(self, node: int) -> Path:
        """Return the path of a node's process listing."""
        return self.path / "nodes" / f"{node}.json"

    def log(self, name: str) -> Path:
        """Return the path of a log: ``node0-agent``, ``node0-slot1-2``, ``node0-standby``, ..."""
        return self.logs / f"{name}.log"

    def segments(self, run_id: str, node: int) -> Path:
        """Return the shared-memory directory of a node."""
        return segment_root(run_id) / f"node{node}"

    def make(self) -> None:
        """Make the directory, for this user alone; an existing directory may be open to readers.

        Raises OwnershipError when others own it or may write to it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        ownership.check_directory(self.path)

    def create(self, info: RunInfo) -> bool:
        """Make all sub-directories and ``run.json``; False when another process was first, and the
        directory belongs to its run. Raises OwnershipError as :meth:`make` does.
        """
        self.make()
        for name in SUB_DIRECTORIES:
            (self.path / name).mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        self._check_owner()
        text = json.dumps(info.to_dict(), indent=1) + "\n"
        # A full disk is better reported now than found by each process at its first write.
        return write_once(self.path / RUN_FILE, text.encode(), _RUN_MODE, _MIN_FREE_BYTES)

    def replace_run(self, info: RunInfo) -> None:
        """Replace ``run.json`` for a new start of the run. Raises OSError."""
        write_json(self.path / RUN_FILE, info.to_dict(), lasting=True, mode=_RUN_MODE)

    def _check_owner(self) -> None:
        """Check the owner of the directory and of those in it whose files are carried out."""
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
            facts = (self.path / RUN_FILE).stat()
            # A new file may have an old inode.
            found = (facts.st_dev, facts.st_ino, facts.st_mtime_ns)
            if found == self._known:
                return
            owner = str(read_json(self.path / RUN_FILE).get("run_id"))
        except (OSError, ValueError):
            return  # removed, or briefly out of reach
        if owner != self.run_id:
            raise OSError(errno.ESTALE, f"it is the directory of run {owner} now", str(self.path))
        self._known = found

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
        found = {}
        for path in sorted((self.path / "nodes").glob("*.json")):
            try:
                self.check_own()
                found[int(path.stem)] = _listing(path)
            except (OSError, *DAMAGE):
                continue  # it is being replaced, or its node was killed before the first write
        return found


def _check_version(path: Path, values: Mapping[str, Any]) -> None:
    """Raise RunDirectoryError for settings of another version, which are not damage."""
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
    """Read a process listing. Raises as :func:`read_json` does, KeyError without an agent, or
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

    All users of a host see the name, and may create it on the run's other hosts: there it gets an
    unpredictable ending, and the oldest directory of this user is the run's.
    """
    named = SEGMENT_ROOT / f"deadpool-{run_id}"
    own = sorted(filter(ownership.is_private, SEGMENT_ROOT.glob(f"{named.name}*")))
    if not own and ownership.is_taken(named):
        return named.with_name(f"{named.name}.{time.time_ns():x}")
    return own[0] if own else named


def unfinished_export(directory: Path, run_id: str, name: str) -> Path:
    """Return the directory of an export until it is complete."""
    return directory / f"{EXPORT_PREFIX}{run_id}-{name}"


def write_json(
    path: Path, values: Mapping[str, Any], *, lasting: bool = False, mode: int = WRITTEN_MODE
) -> None:
    """Replace ``path`` so that a reader sees the old or the new object, never a part. ``lasting``:
    the new object survives a power failure, which may otherwise leave an empty or the old file;
    blocks for the disk."""
    write_text(path, json.dumps(values, indent=1) + "\n", lasting=lasting, mode=mode)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object. Raises OSError, or ValueError for anything else."""
    with os.fdopen(ownership.open_regular(path)) as file:
        values = json.loads(file.read())
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values


def stored_path(path: str | Path, run: Path) -> str:
    """Return a path as the files of a run store it: relative if it lies in the run directory, so
    that it moves with the run, and never points into another run."""
    real = Path(os.path.realpath(path))
    return str(real.relative_to(run) if real.is_relative_to(run) else path)


def read_valid(latest: Path) -> tuple[Restore, ...]:
    """Return the noted checkpoints. Raises OSError, or ValueError when the file is damaged."""
    try:
        found = map(Restore.from_dict, read_json(latest)["valid"])
        return tuple(replace(r, path=r.path and str(latest.parent / r.path)) for r in found)
    except DAMAGE as error:
        raise ValueError(f"{latest} is damaged: {error!r}") from error


def write_latest(latest: Path, valid: Sequence[Restore]) -> None:
    """Write the checkpoints; the next start continues from the first that it can use. Raises
    OSError."""
    parent = latest.parent
    kept = [replace(r, path=r.path and stored_path(r.path, parent)) for r in valid[:_MAX_VALID]]
    write_json(latest, {"valid": [restore.to_dict() for restore in kept]}, lasting=True)


def still_valid(latest: Path, without: Restore) -> list[Restore]:
    """Return the noted checkpoints that exist, except ``without``; none if the file is damaged."""
    try:
        known = read_valid(latest)
    except (FileNotFoundError, ValueError):
        return []
    return [r for r in known if r.path not in ("", without.path) and is_there(r)]


def is_there(restore: Restore) -> bool:
    """Return whether the directory and the index exist; True when that cannot be read now."""
    try:
        names = [path.name for path in Path(restore.path).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    # Formats other than torch_dist, of a user's own loop, have another index name, or none.
    has_shards = any(name.endswith(".distcp") for name in names)
    if restore.kind != "dump" and _INDEX not in names and (not names or has_shards):
        return False
    try:
        return restore.identity in ("", _found_at(restore))
    except (OSError, ValueError):
        return True


def identified(restore: Restore) -> Restore:
    """Return ``restore`` with an identity that distinguishes the present content of its path from
    later content, if that can be read."""
    if not restore.identity and restore.kind != "initial":
        with contextlib.suppress(OSError, ValueError):
            return replace(restore, identity=_found_at(restore))
    return restore


def _found_at(restore: Restore) -> str:
    """Return the run id of a dump, or a checkpoint's fingerprint. Raises OSError or ValueError."""
    path = Path(restore.path)
    if restore.kind != "dump":
        return fingerprint(path)
    above = path.parent if path.name == "dump" else path.parent.parent
    return str(read_json(above / RUN_FILE).get("run_id"))


def fingerprint(path: Path) -> str:
    """Return a digest of samples from the first files of a checkpoint; a copy has the same digest.
    Raises OSError."""
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
    """Note in the run that its checkpoints are in ``directory`` from now on (once, because the time
    counts), and in ``directory`` that this run is its writer. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / _WRITER, run.read_run().run_id)
    if not run.saves.exists():
        write_json(run.saves, {"directory": stored_path(directory, run.path)})


def found_in(saves: Path) -> list[Restore]:
    """Return Megatron's complete checkpoints, the newest first, in the directory that ``saves``
    names: those written after the note, with the index last; none once another run has taken the
    directory. They may not have been reported, so their lineage is unknown.
    """
    found = list[Restore]()
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
                found.append(Restore("durable", generation, "save", str(path)))
    except (OSError, *DAMAGE):
        pass  # the noted checkpoints remain in any case
    return sorted(found, key=lambda restore: restore.generation.iteration, reverse=True)


def missing_paths(valid: Sequence[Restore]) -> frozenset[str]:
    """Return the paths that no longer exist. May block as long as a file system does."""
    with ThreadPoolExecutor(_MAX_VALID) as threads:
        found = list(threads.map(is_there, valid))
    return frozenset(r.path for r, exists in zip(valid, found, strict=True) if not exists)


class OutsideError(ValueError):
    """A path or a name that no order of this run uses; one line."""


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
        return  # written in place: nothing is moved or removed
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
