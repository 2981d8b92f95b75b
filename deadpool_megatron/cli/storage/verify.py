"""Hashes every sealed part of every generation and compares it with its checksum. The
command is read-only and works during a run: a slot that is being overwritten counts as busy.

DIR may be
  a run directory      all of the run's memory on this host, its dumps, its durable checkpoints,
                       what --resume continues from, its frozen weights
  /dev/shm/deadpool-*  (or nodeN in it) generations in memory
  a dump               state that vaults wrote when a run ended without a spare (RUN/dump/...)
  a checkpoint         torch_dist, or a folder of such: the index can be read, each file and byte
                       range that it names is there, and the checksums inside match; of the older
                       format (torch) the checksums alone

examples:
  deadpool verify /shared/run1
  deadpool verify --json /dev/shm/deadpool-3f9c21ab/node3
  deadpool verify /shared/saves/iter_0001000
  srun --ntasks-per-node=1 deadpool verify RUN        the memory of all nodes

exit status: 0 all good; 1 something is bad (named in the last lines); 2 bad input, nothing to
verify in DIR, or something that this version does not know and could not verify
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, size, table
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cluster.run_directory.cleanup import node_directories
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json
from deadpool_megatron.events import Kind, read_events
from deadpool_megatron.ownership import OwnershipError, check_checkpoint
from deadpool_megatron.state import frozen_file
from deadpool_megatron.vault.disk import extras_file
from deadpool_megatron.vault.shm.slot_check import (
    Finding,
    Meter,
    Progress,
    Verdict,
    segment_files,
    verify_segment,
)

EXIT_BAD, EXIT_NOT_VERIFIED = 1, 2
# The index of a torch_dist checkpoint.
_INDEX = ".metadata"
# The files of one of Megatron's older format, each an archive of torch.
_OF_RANKS = "mp_rank_*/*.pt"


@dataclass(frozen=True)
class Subject:
    """One directory (or file) to look at, and how."""

    kind: str
    path: Path
    verify: Callable[[Path, Progress], Iterator[Finding]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="see above")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Verify and say what was found."""
    subjects = find_subjects(args.directory)
    found: list[tuple[Subject, Finding]] = []
    display = Display(sys.stderr, quiet=args.json or not sys.stderr.isatty())
    total = sum(_bytes_in(subject.path) for subject in subjects)

    def show(done: int) -> None:
        display.status(f"{size(done)} of at most {size(total)}", done / max(1, total))

    meter = Meter(show)
    for subject in subjects:
        found += [(subject, finding) for finding in subject.verify(subject.path, meter)]
    display.close()
    verdicts = {finding.verdict for _, finding in found}
    status = EXIT_NOT_VERIFIED if Verdict.UNKNOWN in verdicts else 0
    status = EXIT_BAD if Verdict.BAD in verdicts else status
    if args.json:
        print(json.dumps({"ok": not status, "findings": [_to_dict(t, f) for t, f in found]}))
    else:
        print("\n".join(_lines(subjects, found)))
    return status


def find_subjects(directory: Path) -> list[Subject]:
    """Return what is to be verified in a directory. Raises CommandError when there is nothing."""
    if not directory.is_dir():
        raise CommandError(f"{directory} is not a directory")
    found = list(dict.fromkeys(_subjects(directory)))
    if not found:
        hint = "name a run directory, /dev/shm/deadpool-..., a dump, or a torch_dist checkpoint"
        if (directory / "run.json").exists():
            hint = "its run has left no dump, no checkpoint, and nothing in this host's memory"
        raise CommandError(f"{directory} holds nothing to verify: {hint}")
    return found


def _subjects(directory: Path) -> Iterator[Subject]:
    if (directory / "run.json").exists():
        yield from _of_run(RunDirectory(directory))
    elif _is_checkpoint(directory):
        yield Subject("checkpoint", directory, verify_checkpoint)
    elif files := segment_files(directory):
        dumped = all(path.name.startswith("dump-") for path in files)
        yield Subject("dump" if dumped else "memory", directory, _segments)
    else:
        below = sorted(path for path in directory.iterdir() if path.is_dir())
        for path in below:
            if _is_checkpoint(path) or segment_files(path):
                yield from _subjects(path)


def _is_checkpoint(directory: Path) -> bool:
    return (directory / _INDEX).exists() or any(directory.glob(_OF_RANKS))


def _of_run(run: RunDirectory) -> Iterator[Subject]:
    dumps = sorted(run.dump.glob("*")) if run.dump.is_dir() else []
    for kind, paths in (("memory", node_directories(run.read_run().run_id)), ("dump", dumps)):
        yield from (Subject(kind, path, _segments) for path in paths if segment_files(path))
    for path in dict.fromkeys(_durable(run)):
        if path.is_dir():
            yield Subject("checkpoint", path, verify_checkpoint)
    if run.latest.exists():
        yield Subject("latest", run.latest, _latest)
    if frozen_file.files_in(run.frozen):
        yield Subject("frozen", run.frozen, _frozen)


def _segments(directory: Path, progress: Progress) -> Iterator[Finding]:
    for path in segment_files(directory):
        yield from verify_segment(path, progress)


def _frozen(folder: Path, progress: Progress) -> Iterator[Finding]:
    for path in frozen_file.files_in(folder):
        yield _judged(path, "frozen weights", frozen_file.problem_in(path, progress))


def _judged(path: Path, what: str, trouble: str) -> Finding:
    verdict = Verdict.BAD if trouble else Verdict.GOOD
    return Finding(path, what, path.stat().st_size, verdict, trouble)


def _latest(path: Path, _: Progress) -> Iterator[Finding]:
    reason = _trouble_with(path, "kind", "")
    newest = {} if reason else read_json(path)
    place = path.parent / str(newest.get("path"))
    if newest.get("kind") in ("durable", "dump") and not place.is_dir():
        reason = f"names {place}, which is not there"
    verdict = Verdict.BAD if reason else Verdict.GOOD
    yield Finding(path, "what --resume continues from", 0, verdict, reason)


def _trouble_with(path: Path, name: str, without: str) -> str:
    """Return why a file is no JSON object, or ``without`` for one that lacks ``name``."""
    try:
        return "" if name in read_json(path) else without
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        return f"cannot be read: {error}"


def _durable(run: RunDirectory) -> Iterator[Path]:
    """Those that were ever written. Older ones may have been removed since, by whoever trains."""
    for event in read_events(run.events):
        if event.kind is Kind.DURABLE and "path" in event.data:
            yield Path(str(event.data["path"]))
    with contextlib.suppress(OSError, ValueError, KeyError, RecursionError):  # said of the file
        newest = read_json(run.latest)
        if newest.get("kind") == "durable":
            yield run.path / str(newest["path"])


def verify_checkpoint(directory: Path, progress: Progress) -> Iterator[Finding]:
    """A finding for each file of a checkpoint: the index of a torch_dist one can be read, all files
    and byte ranges that it names are there, and the checksums of the archives that torch writes
    match.

    Nothing more once the directory is gone: a run that is alive prunes.
    """
    for finding in _of_checkpoint(directory, progress):
        if finding.verdict is Verdict.BAD and not directory.is_dir():
            return
        yield finding


def _of_checkpoint(directory: Path, progress: Progress) -> Iterator[Finding]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    for path in extras_file.files_in(directory):
        yield _judged(path, "extras", extras_file.trouble_with(path))
    if files := sorted(directory.glob(_OF_RANKS)):
        yield from (_verify_file(one, None, progress) for one in files)
        return
    path, ranges = directory / _INDEX, defaultdict[str, list[tuple[int, int]]](list)
    try:
        check_checkpoint(directory)  # an index is unpickled: one of somebody else could do anything
        index = FileSystemReader(directory).read_metadata()
        is_in_index = any(key.startswith("common_state/") for key in index.state_dict_metadata)
        for place in index.storage_data.values():
            ranges[place.relative_path].append((place.offset, place.length))
    except (ImportError, AttributeError, OwnershipError) as error:
        # It names what is not installed here, or is not to be believed.
        yield Finding(path, "index", 0, Verdict.UNKNOWN, str(error))
        return
    except Exception as error:  # what a parser makes of damaged bytes cannot be listed
        yield Finding(path, "index", 0, Verdict.BAD, f"cannot be read: {error!r}")
        return
    count = sum(map(len, ranges.values()))
    yield Finding(path, f"index of {count} entries", path.stat().st_size, Verdict.GOOD)
    for name, found in sorted(ranges.items()):
        if "/" in name:  # it would lead out of the checkpoint
            yield Finding(directory / name, "entries", 0, Verdict.BAD, "is no name of a file in it")
        else:
            yield _verify_file(directory / name, found, progress)
    # What Megatron adds to those of torch. From 0.19 on the common values are in the index.
    common, configuration = directory / "common.pt", directory / "metadata.json"
    if common.exists() or (configuration.exists() and not is_in_index):
        yield _verify_file(common, None, progress)
    if common.exists() or configuration.exists() or is_in_index:
        # Without it Megatron takes the directory for no checkpoint of this format.
        reason = _trouble_with(
            configuration, "sharded_backend", "does not say how it is to be read"
        )
        yield Finding(configuration, "format", 0, Verdict.BAD if reason else Verdict.GOOD, reason)


def _verify_file(path: Path, ranges: list[tuple[int, int]] | None, progress: Progress) -> Finding:
    """``ranges``: of the archives in it; None for a file that is one."""
    what = "1 entry" if ranges is None else f"{len(ranges)} entries"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for offset, length in sorted([(0, size)] if ranges is None else ranges):
                if offset < 0 or length < 0 or offset + length > size:
                    reason = f"has {size} bytes, an entry lies at {offset} + {length}"
                    return Finding(path, what, size, Verdict.BAD, reason)
                if reason := _damage(_Slice(file, offset, length), is_archive=ranges is None):
                    text = f"entry at {offset} + {length}: {reason}"
                    return Finding(path, what, size, Verdict.BAD, text)
                progress(length)
    except OSError as error:
        return Finding(path, what, 0, Verdict.BAD, error.strerror or str(error))
    return Finding(path, what, size, Verdict.GOOD)


def _damage(entry: _Slice, *, is_archive: bool) -> str:
    """Return why an entry cannot be used; torch writes each as an archive with a CRC of every
    record."""
    head = entry.read(4)
    if head != b"PK\x03\x04":
        if is_archive or (head and not head.strip(b"\0")):
            return "is no archive of torch" if head.strip(b"\0") else "is empty"
        return ""  # another way to write; that its bytes are there is all that can be said
    entry.seek(0)
    try:
        with zipfile.ZipFile(entry) as archive:
            broken = archive.testzip()
    except OSError:
        raise  # of the file, not of what is in it
    except Exception as error:  # what a parser makes of damaged bytes cannot be listed
        return str(error) or repr(error)
    return f"CRC of {broken} does not match" if broken else ""


class _Slice(io.RawIOBase):
    """A range of a file as a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        left = max(0, self._length - self._at)
        count: int = self._file.readinto(memoryview(buffer)[:left])
        self._at += count
        return count


def _to_dict(subject: Subject, finding: Finding) -> dict[str, Any]:
    values = {
        "kind": subject.kind,
        "path": str(finding.path),
        "what": finding.what,
        "bytes": finding.nbytes,
        "verdict": str(finding.verdict),
        "reason": finding.reason,
        "role": finding.role,
        "generation": finding.generation.to_list() if finding.generation else None,
    }
    return {key: value for key, value in values.items() if value not in (None, "")}


def _lines(subjects: Iterable[Subject], found: list[tuple[Subject, Finding]]) -> list[str]:
    rows = []
    for subject in subjects:
        mine = [finding for of, finding in found if of == subject]
        generations = sorted({f.generation for f in mine if f.generation is not None})
        for generation in [*reversed(generations), None]:
            those = [f for f in mine if f.generation == generation]
            if those:
                rows.append(_row(subject, generation, those))
        if not mine:
            rows.append([f"{subject.kind} {subject.path}", "-", "-", "0", "0 B", "nothing sealed"])
    header = ("where", "generation", "roles", "parts", "size", "verdict")
    lines = table(header, rows)
    for _, finding in found:
        if finding.verdict in (Verdict.BAD, Verdict.UNKNOWN):
            where = f"{finding.path}: {finding.what}"
            if finding.generation is not None:
                where += f" of {finding.generation.lineage}:{finding.generation.iteration}"
            lines.append(f"  {finding.verdict.upper()} {where}: {finding.reason}")
    return lines


def _row(subject: Subject, generation: Any, findings: list[Finding]) -> list[str]:
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    shown = [f"{n} {verdict}" for verdict, n in counts.items() if n and verdict is not Verdict.GOOD]
    roles = {finding.role for finding in findings if finding.role is not None}
    return [
        f"{subject.kind} {subject.path}",
        "-" if generation is None else f"{generation.lineage}:{generation.iteration}",
        str(len(roles)) if roles else "-",
        str(len(findings)),
        size(sum(finding.nbytes for finding in findings)),
        ", ".join(shown) or "good",
    ]


def _bytes_in(path: Path) -> int:
    """Bytes of a file or of the files below a folder, some of which need not be verified."""
    files = path.rglob("*") if path.is_dir() else [path]
    with contextlib.suppress(OSError):  # a run that is alive removes some
        return sum(file.stat().st_size for file in files if file.is_file())
    return 0
