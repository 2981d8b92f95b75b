"""The run directory: where each file of a run is, how small JSON files are replaced safely, what
the next start continues from, and which names an order may have written and removed.

Layout (contract between all processes of a run)::

    run.json  secret  coordinator.json  journal/  events.jsonl  final.json
    latest.json  nodes/<id>.json  logs/  checkpoints/  dump/  exports/  exported.json  named.txt
    saves.json  skeletons/  frozen/  launcher.lock  program/  datasets-ready

``latest.json`` has the valid checkpoints and dumps, the best first. None of them is decided on
without a look whether it is still there.

Orders pass under a MAC, but whoever has become one agent, or holds one member, must not thereby
have a word in what other hosts remove. So names are looked at where things are done: dumps lie in
the run directory, and what is removed elsewhere has a name that only this run gives.
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

# In the directory of a node in shared memory: what its processes print, before it is copied.
LOGS = "logs"
SEGMENT_ROOT = Path("/dev/shm")
RUN_FILE = "run.json"
# Logs, events and records of a short run.
_LEAST_ROOM_BYTES = 256 << 10
ENVIRONMENT_DIRECTORY = "DEADPOOL_RUN_DIR"
ENVIRONMENT_RUN_ID = "DEADPOOL_RUN_ID"
RUN_ID = re.compile(r"[0-9a-f]{8}")
EXPORT_PREFIX = ".export-"
# Made with the directory, before it is that of a run.
SUB_DIRECTORIES = ("journal", "nodes", "logs", "checkpoints", "dump")
# Others may read what is in a run directory, where the umask lets them, but never write it: what it
# says is carried out.
DIRECTORY_MODE = 0o755
# Settings may have addresses with a password in them.
_RUN_MODE = 0o600
# So many are remembered: what was saved long before is found by who looks for it.
_MAX_VALID = 16
_INDEX = ".metadata"
# Beside the checkpoints: the id of the run that has written there last.
_WRITER = "deadpool-writer"
# What is looked at to tell a checkpoint from another: a recovery waits for it.
_SHARDS, _SAMPLES, _SAMPLE_BYTES = 2, 8, 4096
_EXPORT_NAME = re.compile(r"\d{1,9}(\.[0-9a-f]{8})?\.\d{1,9}")
_GENERATION = re.compile(r"\d+-\d+")
_CHECKPOINT = re.compile(r"iter_\d+")


class RunDirectoryError(UserError):
    """The directory is no run directory, or is damaged; one clear line."""


@dataclass(frozen=True)
class RunInfo:
    """Content of ``run.json``: fixed until the run is started again, the same on every node.

    ``check_only``: it ends when its nodes are judged. ``finished``: iterations that were finished
    before this start; ``from_scratch``: it may begin again where nothing is left of them.
    ``ended_term`` and ``ended_epoch``: newest ones of the starts before this one, all of whose
    processes have ended. ``directory``: the working directory of the start.
    """

    run_id: str
    world_size: int
    nodes: int
    spares: int
    nproc_per_node: int
    command: tuple[str, ...]
    settings: Settings
    restore: Mapping[str, Any] = field(default_factory=dict)
    check_only: bool = False
    ended_term: int = 0
    ended_epoch: int = 0
    finished: int = 0
    from_scratch: bool = False
    directory: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the version that writes it."""
        return {"version": deadpool_megatron.__version__, **write(self)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> RunInfo:
        """Inverse of :meth:`to_dict`. Raises KeyError, TypeError, ValueError or SettingsError."""
        if not RUN_ID.fullmatch(str(values["run_id"])):  # it becomes part of a path that is removed
            raise ValueError(f"{values['run_id']!r} is no run id")
        info: RunInfo = read(RunInfo, values)
        return info


def member_log_name(node: int, local_rank: int, incarnation: int) -> str:
    """Name of a member's log."""
    return f"node{node}-slot{local_rank}-{incarnation}"


class RunDirectory:
    """Paths and small files of one run; thread-safe. The path is real: a link that leads elsewhere
    later does not lead this process to another run. ``run_id``: the run that this process belongs
    to, set by its own processes; what another run has put in the place of its directory does not
    count."""

    def __init__(self, path: Path) -> None:
        self.path = path = Path(os.path.realpath(path))
        self.run_id = ""
        self._known: tuple[int, ...] = ()
        self.events = path / "events.jsonl"  # the coordinator is the only writer
        self.final = path / "final.json"  # written once, when the run is over
        self.journal = path / "journal"
        self.coordinator = path / "coordinator.json"  # its address and pid
        self.logs = path / "logs"  # what processes have printed, a file for each
        # Generations that vaults have written of a run that ends for lack of nodes.
        self.dump = path / "dump"
        self.latest = path / "latest.json"  # newest durable checkpoint or dump
        # Checkpoints written in the background, unless a setting names another directory; which of
        # these there are, for the next one to prune.
        self.exports = path / "exports"
        self.exported = path / "exported.json"
        self.templates = path / "skeletons"  # what each role adds to a checkpoint
        self.frozen = path / "frozen"  # weights that no iteration changes, if they are large
        # Names the directory to which the program saves by itself, from before it first does.
        self.saves = path / "saves.json"
        # Every checkpoint that this run has given its name, and for whom (see durable.py).
        self.named = path / "named.txt"
        self.launcher_lock = path / "launcher.lock"  # of the one ``deadpool run`` that uses it
        # Role 0 has made the index files of the data; it has the kinds of parameters of all roles.
        self.built = path / "datasets-ready"
        # A file for each agent that has written what an earlier run has left on its host.
        self.resuming = path / "resuming"

    def node(self, node: int) -> Path:
        """Process listing of a node."""
        return self.path / "nodes" / f"{node}.json"

    def log(self, name: str) -> Path:
        """``name``: ``node0-agent``, ``node0-slot1-2``, ``node0-standby``, ..."""
        return self.logs / f"{name}.log"

    def segments(self, run_id: str, node: int) -> Path:
        """Shared-memory directory of a node."""
        return segment_root(run_id) / f"node{node}"

    def make(self) -> None:
        """Make the directory, for this user alone; one that is there may be open to readers.

        Raises OwnershipError when others own it or may write to it.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        ownership.check_directory(self.path)

    def create(self, info: RunInfo) -> bool:
        """Make all sub-directories and ``run.json``; False when another process was first, whose
        run it is then. Raises OwnershipError like :meth:`make`.
        """
        self.make()
        for name in SUB_DIRECTORIES:
            (self.path / name).mkdir(DIRECTORY_MODE, parents=True, exist_ok=True)
        self._check_owner()
        text = json.dumps(info.to_dict(), indent=1) + "\n"
        # Without room it is better said now than found by each process that has something to write.
        return write_once(self.path / RUN_FILE, text.encode(), _RUN_MODE, _LEAST_ROOM_BYTES)

    def replace_run(self, info: RunInfo) -> None:
        """Have the run start again as ``info`` says. Raises OSError."""
        write_json(self.path / RUN_FILE, info.to_dict(), lasting=True, mode=_RUN_MODE)

    def _check_owner(self) -> None:
        """Of the directory, and of those in it whose files are carried out."""
        for path in (self.path, self.journal, self.node(0).parent):
            ownership.check_directory(path)

    def read_run(self, *, only_to_show: bool = False) -> RunInfo:
        """Return what the run is. Raises RunDirectoryError when this is not the directory of a run,
        and OwnershipError when somebody else could have written it, unless it is ``only_to_show``.
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
        """Raise OSError where another run has taken the place of the run of this process."""
        if not self.run_id:
            return
        try:
            facts = (self.path / RUN_FILE).stat()
            found = (
                facts.st_dev,
                facts.st_ino,
                facts.st_mtime_ns,
            )  # a new file may have an old inode
            if found == self._known:
                return
            owner = str(read_json(self.path / RUN_FILE).get("run_id"))
        except (OSError, ValueError):
            return  # removed, or away for a moment
        if owner != self.run_id:
            raise OSError(errno.ESTALE, f"it is the directory of run {owner} now", str(self.path))
        self._known = found

    def has_final(self) -> bool:
        """Return whether there is a result; not while the directory is away for a moment."""
        try:
            self.check_own()
            return self.final.exists()
        except OSError:
            return False

    def read_final(self) -> dict[str, Any]:
        """Return how the run ended: all of ``final.json``, with ``exit_status``, ``reason`` and
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
        """All process listings that can be read, by node id."""
        found = {}
        for path in sorted((self.path / "nodes").glob("*.json")):
            try:
                self.check_own()
                found[int(path.stem)] = _listing(path)
            except (OSError, *DAMAGE):
                continue  # being replaced, or of a node that was killed before its first write
        return found


def _check_version(path: Path, values: Mapping[str, Any]) -> None:
    """Raises RunDirectoryError for settings of another version: that is no damage."""
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
    """Raises what :func:`read_json` raises, KeyError where the agent is missing, or TypeError where
    a number of a process is none."""
    values = read_json(path)
    started = values.get("started", {})
    numbers = [values["agent"], *(ticks or 0 for ticks in dict(started).values())]
    if not all(isinstance(one, int) for one in numbers) or not all(map(str.isdigit, started)):
        raise TypeError(f"{path} names what is no process")
    return values


def address_in(text: str) -> tuple[str, int] | None:
    """Return where the coordinator listens, by its ``coordinator.json``; None when that does not
    say."""
    try:
        values = json.loads(text)
        return str(values["host"]), int(values["port"])
    except DAMAGE:
        return None


def slots_are_kept(run: RunDirectory) -> bool:
    """Return whether the run ended with a result, but left what it held in memory for another
    start."""
    try:
        return bool(read_json(run.final).get("slots_kept", False))
    except (OSError, ValueError):
        return False


def segment_root(run_id: str) -> Path:
    """Shared-memory directory of a run on this host.

    All users of a host see the name, and may make it on the run's other hosts: there it gets an
    ending that nobody can know beforehand, and the oldest directory of ours is the run's.
    """
    named = SEGMENT_ROOT / f"deadpool-{run_id}"
    ours = sorted(filter(ownership.is_private, SEGMENT_ROOT.glob(f"{named.name}*")))
    if not ours and ownership.is_taken(named):
        return named.with_name(f"{named.name}.{time.time_ns():x}")
    return ours[0] if ours else named


def unfinished_export(directory: Path, run_id: str, name: str) -> Path:
    """Return where an export is written until it is whole."""
    return directory / f"{EXPORT_PREFIX}{run_id}-{name}"


def write_json(
    path: Path, values: Mapping[str, Any], *, lasting: bool = False, mode: int = WRITTEN_MODE
) -> None:
    """Replace ``path`` so that a reader sees the old or the new object, never a part. ``lasting``:
    the new one after a power failure, too, which may leave the name on nothing, or on the old one;
    blocks for the disk."""
    write_text(path, json.dumps(values, indent=1) + "\n", lasting=lasting, mode=mode)


def read_json(path: Path) -> dict[str, Any]:
    """Raises OSError, or ValueError for anything but a JSON object."""
    with os.fdopen(ownership.open_regular(path)) as file:
        values = json.loads(file.read())
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values


def noted(path: str | Path, run: Path) -> str:
    """Return a path as the files of a run have it: what lies in the run directory as seen from
    there, so that it moves with the run, and is never looked for in another one."""
    real = Path(os.path.realpath(path))
    return str(real.relative_to(run) if real.is_relative_to(run) else path)


def read_valid(latest: Path) -> tuple[Restore, ...]:
    """Return what is noted. Raises OSError, and ValueError when the file is damaged."""
    try:
        found = valid_in(read_json(latest))
        return tuple(replace(one, path=one.path and str(latest.parent / one.path)) for one in found)
    except DAMAGE as error:
        raise ValueError(f"{latest} is damaged: {error!r}") from error


def valid_in(values: Mapping[str, Any]) -> tuple[Restore, ...]:
    """Return what :func:`as_dict` was given; nothing in an empty mapping. Raises DAMAGE."""
    found = (values, *values.get("older", ())) if values else ()
    return tuple(map(Restore.from_dict, found))


def as_dict(valid: Sequence[Restore]) -> dict[str, Any]:
    """JSON form of at least one: that of the first, with the others beside it."""
    first, *older = valid
    beside = {"older": [one.to_dict() for one in older]} if older else {}
    return {**first.to_dict(), **beside}


def point_at(latest: Path, valid: Sequence[Restore]) -> None:
    """Have the next start continue from the first of these that it can use. Raises OSError."""
    paths = [one.path and noted(one.path, latest.parent) for one in valid[:_MAX_VALID]]
    found = [replace(one, path=path) for one, path in zip(valid, paths, strict=False)]
    write_json(latest, as_dict(found), lasting=True)


def still_valid(latest: Path, without: Restore) -> list[Restore]:
    """All but one of those that are noted, and still there; none where the file is damaged."""
    try:
        known = read_valid(latest)
    except (FileNotFoundError, ValueError):
        return []
    return [one for one in known if one.path not in ("", without.path) and is_there(one)]


def is_there(restore: Restore) -> bool:
    """True where its directory and its index are there; what cannot be looked at now may be."""
    try:
        names = [one.name for one in Path(restore.path).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    # Other formats than torch_dist, of a loop of one's own, have an index of another name or none.
    has_shards = any(name.endswith(".distcp") for name in names)
    if restore.kind != "dump" and _INDEX not in names and (not names or has_shards):
        return False
    try:
        return restore.identity in ("", _found_at(restore))
    except (OSError, ValueError):
        return True


def identified(restore: Restore) -> Restore:
    """Return it with what tells what is at its path now from what may be there later, if that can
    be read."""
    if not restore.identity and restore.kind != "initial":
        with contextlib.suppress(OSError, ValueError):
            return replace(restore, identity=_found_at(restore))
    return restore


def _found_at(restore: Restore) -> str:
    """Return whose dump it is, or which checkpoint. Raises OSError or ValueError."""
    path = Path(restore.path)
    if restore.kind != "dump":
        return fingerprint(path)
    above = path.parent if path.name == "dump" else path.parent.parent
    return str(read_json(above / RUN_FILE).get("run_id"))


def fingerprint(path: Path) -> str:
    """Return a digest of bytes here and there in the first files of a checkpoint, which a copy of
    it has as well. Raises OSError."""
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
    """Note that checkpoints of this run are written in ``directory`` from now on, once, for its
    time counts; and in ``directory`` that those of others are not. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / _WRITER, run.read_run().run_id)
    if not run.saves.exists():
        write_json(run.saves, {"directory": noted(directory, run.path)})


def found_in(saves: Path) -> list[Restore]:
    """Complete checkpoints of Megatron's, the newest first, in the directory that ``saves``
    names: written since it does, and their index last; none once another run has taken the
    directory. Nobody may have been told of them, so the line that they are of is not known.
    """
    found = list[Restore]()
    try:
        since = saves.stat().st_mtime
        directory = saves.parent / read_json(saves)["directory"]
        if (directory / _WRITER).read_text() != read_json(saves.parent / RUN_FILE)["run_id"]:
            return []
        for path in directory.glob("iter_[0-9]*"):
            times = [one.stat().st_mtime for one in path.glob("*.distcp")]
            is_whole = (path / _INDEX).exists() and (path / "metadata.json").exists()
            is_whole = is_whole and not extras_file.lacks_some(path)
            if is_whole and since <= max(times) <= (path / _INDEX).stat().st_mtime:
                generation = Generation(0, int(path.name.removeprefix("iter_")))
                found.append(Restore("durable", generation, "save", str(path)))
    except (OSError, *DAMAGE):
        pass  # what is noted is there all the same
    return sorted(found, key=lambda one: one.generation.iteration, reverse=True)


def paths_gone(valid: Sequence[Restore]) -> frozenset[str]:
    """The paths of those that are not there any more. May take as long as a file system does."""
    with ThreadPoolExecutor(_MAX_VALID) as threads:
        found = list(threads.map(is_there, valid))
    return frozenset(one.path for one, there in zip(valid, found, strict=True) if not there)


class OutsideError(ValueError):
    """A path or a name that no order of this run has; one line."""


def export_name(name: str) -> str:
    """The name of an export, which becomes part of those of files. Raises OutsideError."""
    if not _EXPORT_NAME.fullmatch(name):
        raise OutsideError(f"{name[:80]!r} is not the name of an export")
    return name


def export_directory(directory: str, name: str) -> Path:
    """Return where an export is written until it is whole, under this name of a directory; the user
    may have named any other one to have it in. Raises OutsideError."""
    path = Path(directory)
    if not path.is_absolute() or path.name != name:
        raise OutsideError(f"{directory!r} is not where this run writes {name}")
    return path


def dump_directory(directory: str, run: RunDirectory) -> str:
    """Check where a vault dumps one generation, or several of them. Raises OutsideError."""
    path = Path(directory)
    above = path.parent if _GENERATION.fullmatch(path.name) else path
    # The nodes may have come to the same directory by different links.
    if above != run.dump and os.path.realpath(above) != os.path.realpath(run.dump):
        raise OutsideError(f"{directory!r} is not in the dump directory of this run, {run.dump}")
    return directory


def check_save(temporary: Path, final: Path) -> None:
    """Check where a save was written, and the name it is to get. Raises OutsideError."""
    if temporary == final:
        return  # written in place: nothing of it is moved or removed
    epoch = temporary.name.removeprefix(f".{final.name}.epoch")
    if (
        temporary.parent != final.parent
        or not _CHECKPOINT.fullmatch(final.name)
        or not (epoch.isdigit() and temporary.name == f".{final.name}.epoch{epoch}")
    ):
        raise OutsideError(f"{temporary} is not where a save to {final} is written")


def is_checkpoint(path: Path) -> bool:
    """True where it has the name of a checkpoint, which may be pruned as a whole."""
    return path.is_absolute() and bool(_CHECKPOINT.fullmatch(path.name))
