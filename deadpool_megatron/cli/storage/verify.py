"""Hashes every sealed part of every generation and compares it with its checksum. The
command is read-only and works during a run: a slot that is being overwritten counts as busy.

DIR may be
  a run directory      all of the run's memory on this host, its dumps, its durable checkpoints,
                       what --resume continues from, its frozen weights
  /dev/shm/deadpool-*  (or nodeN in it) generations in memory
  a dump               state that vaults wrote when a run ended without a spare (RUN/dump/...)
  a checkpoint         or a folder of checkpoints. In the format torch_dist, the index can be read,
                       each file and byte range that it names is there, and the checksums inside
                       match. In the older format (torch), only the checksums are verified

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
from deadpool_megatron.vault.shm import slot_check
from deadpool_megatron.vault.shm.slot_check import Finding, Progress, Verdict, segment_files

EXIT_BAD, EXIT_NOT_VERIFIED = 1, 2
# The index of a torch_dist checkpoint.
_INDEX = ".metadata"
# The files of a checkpoint in Megatron's older format, each an archive of torch.
_RANK_FILES = "mp_rank_*/*.pt"


@dataclass(frozen=True)
class Subject:
    """A directory (or file) to verify, and the function that verifies it."""

    kind: str
    path: Path
    verify: Callable[[Path, Progress], Iterator[Finding]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="see above")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Verify, and print the findings."""
    subjects = find_subjects(args.directory)
    findings: list[tuple[Subject, Finding]] = []
    display = Display(sys.stderr, quiet=args.json or not sys.stderr.isatty())
    total = sum(_bytes_in(subject.path) for subject in subjects)

    def show(done: int) -> None:
        display.status(f"{size(done)} of at most {size(total)}", done / max(1, total))

    meter = slot_check.Meter(show)
    for subject in subjects:
        findings += [(subject, finding) for finding in subject.verify(subject.path, meter)]
    display.close()
    verdicts = {finding.verdict for _, finding in findings}
    status = EXIT_NOT_VERIFIED if Verdict.UNKNOWN in verdicts else 0
    status = EXIT_BAD if Verdict.BAD in verdicts else status
    if args.json:
        print(json.dumps({"ok": not status, "findings": [_to_dict(t, f) for t, f in findings]}))
    else:
        print("\n".join(_lines(subjects, findings)))
    return status


def find_subjects(directory: Path) -> list[Subject]:
    """Return the subjects to verify in a directory. Raises CommandError if there are none."""
    if not directory.is_dir():
        raise CommandError(f"{directory} is not a directory")
    subjects = list(dict.fromkeys(_subjects(directory)))
    if not subjects:
        hint = "name a run directory, /dev/shm/deadpool-..., a dump, or a torch_dist checkpoint"
        if (directory / "run.json").exists():
            hint = "its run has left no dump, no checkpoint, and nothing in this host's memory"
        raise CommandError(f"{directory} holds nothing to verify: {hint}")
    return subjects


def _subjects(directory: Path) -> Iterator[Subject]:
    if (directory / "run.json").exists():
        yield from _subjects_of_run(RunDirectory(directory))
    elif _is_checkpoint(directory):
        yield Subject("checkpoint", directory, verify_checkpoint)
    elif files := segment_files(directory):
        is_dump = all(path.name.startswith("dump-") for path in files)
        yield Subject("dump" if is_dump else "memory", directory, _verify_segments)
    else:
        folders = sorted(path for path in directory.iterdir() if path.is_dir())
        for path in folders:
            if _is_checkpoint(path) or segment_files(path):
                yield from _subjects(path)


def _is_checkpoint(directory: Path) -> bool:
    return (directory / _INDEX).exists() or any(directory.glob(_RANK_FILES))


def _subjects_of_run(run: RunDirectory) -> Iterator[Subject]:
    dumps = sorted(run.dump.glob("*")) if run.dump.is_dir() else []
    for kind, paths in (("memory", node_directories(run.read_run().run_id)), ("dump", dumps)):
        yield from (Subject(kind, path, _verify_segments) for path in paths if segment_files(path))
    for path in dict.fromkeys(_durable_checkpoints(run)):
        if path.is_dir():
            yield Subject("checkpoint", path, verify_checkpoint)
    if run.latest.exists():
        yield Subject("latest", run.latest, _verify_latest)
    if frozen_file.files_in(run.frozen):
        yield Subject("frozen", run.frozen, _verify_frozen)


def _verify_segments(directory: Path, progress: Progress) -> Iterator[Finding]:
    for path in segment_files(directory):
        yield from slot_check.verify_segment(path, progress)


def _verify_frozen(folder: Path, progress: Progress) -> Iterator[Finding]:
    for path in frozen_file.files_in(folder):
        yield _finding(path, "frozen weights", frozen_file.problem_in(path, progress))


def _finding(path: Path, noun: str, reason: str, nbytes: int | None = None) -> Finding:
    verdict = Verdict.BAD if reason else Verdict.GOOD
    return Finding(path, noun, path.stat().st_size if nbytes is None else nbytes, verdict, reason)


def _verify_latest(path: Path, _: Progress) -> Iterator[Finding]:
    reason = _problem_of(path, "kind", "")
    newest = {} if reason else read_json(path)
    place = path.parent / str(newest.get("path"))
    if newest.get("kind") in ("durable", "dump") and not place.is_dir():
        reason = f"names {place}, which is not there"
    yield _finding(path, "what --resume continues from", reason, nbytes=0)


def _problem_of(path: Path, name: str, missing: str) -> str:
    """Return the reason why a file cannot be read as a JSON object, or ``missing`` if the object
    lacks the key ``name``; empty if the file is good."""
    try:
        return "" if name in read_json(path) else missing
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, RecursionError) as error:
        return f"cannot be read: {error}"


def _durable_checkpoints(run: RunDirectory) -> Iterator[Path]:
    """Yield all checkpoints that the run has written; some may have been removed since."""
    for event in read_events(run.events):
        if event.kind is Kind.DURABLE and "path" in event.data:
            yield Path(str(event.data["path"]))
    # _verify_latest() reports these errors.
    with contextlib.suppress(OSError, ValueError, KeyError, RecursionError):
        newest = read_json(run.latest)
        if newest.get("kind") == "durable":
            yield run.path / str(newest["path"])


def verify_checkpoint(directory: Path, progress: Progress) -> Iterator[Finding]:
    """Yield a finding for each file of a checkpoint. The torch_dist index must be readable, the
    files and byte ranges in it must exist, and the checksums of torch's archives must match.

    Stops if the directory is removed: a live run removes old checkpoints.
    """
    for finding in _verify_files(directory, progress):
        if finding.verdict is Verdict.BAD and not directory.is_dir():
            return
        yield finding


def _verify_files(directory: Path, progress: Progress) -> Iterator[Finding]:
    """Yield the findings of :func:`verify_checkpoint`, also while the directory is removed."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    for path in extras_file.files_in(directory):
        yield _finding(path, "extras", extras_file.problem_in(path))
    if files := sorted(directory.glob(_RANK_FILES)):
        yield from (_verify_file(file, None, progress) for file in files)
        return
    path, ranges = directory / _INDEX, defaultdict[str, list[tuple[int, int]]](list)
    try:
        check_checkpoint(directory)  # the index is unpickled, so another user's could run any code
        index = FileSystemReader(directory).read_metadata()
        is_in_index = any(key.startswith("common_state/") for key in index.state_dict_metadata)
        for place in index.storage_data.values():
            ranges[place.relative_path].append((place.offset, place.length))
    except (ImportError, AttributeError, OwnershipError) as error:
        # The index needs a package that is not installed, or is another user's.
        yield Finding(path, "index", 0, Verdict.UNKNOWN, str(error))
        return
    except Exception as error:  # damaged bytes may raise any error in a parser
        yield _finding(path, "index", f"cannot be read: {error!r}", nbytes=0)
        return
    count = sum(map(len, ranges.values()))
    yield _finding(path, f"index of {count} entries", "")
    for name, file_ranges in sorted(ranges.items()):
        if "/" in name:  # the path would lead out of the checkpoint
            yield _finding(directory / name, "entries", "is not a file of the checkpoint", nbytes=0)
        else:
            yield _verify_file(directory / name, file_ranges, progress)
    # Megatron adds files to those of torch. From 0.19 on the common values are in the index.
    common, configuration = directory / "common.pt", directory / "metadata.json"
    if common.exists() or (configuration.exists() and not is_in_index):
        yield _verify_file(common, None, progress)
    if common.exists() or configuration.exists() or is_in_index:
        # Without the configuration Megatron does not recognize the format.
        text = "does not say how it is to be read"
        reason = _problem_of(configuration, "sharded_backend", text)
        yield _finding(configuration, "format", reason, nbytes=0)


def _verify_file(path: Path, ranges: list[tuple[int, int]] | None, progress: Progress) -> Finding:
    """Verify a file. ``ranges``: (offset, length) of the entries in it, in bytes; None if the whole
    file is an archive."""
    noun = "1 entry" if ranges is None else f"{len(ranges)} entries"
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for offset, length in sorted([(0, size)] if ranges is None else ranges):
                if offset < 0 or length < 0 or offset + length > size:
                    reason = f"has {size} bytes, an entry lies at {offset} + {length}"
                    return _finding(path, noun, reason, size)
                if reason := _damage(_Slice(file, offset, length), is_archive=ranges is None):
                    text = f"entry at {offset} + {length}: {reason}"
                    return _finding(path, noun, text, size)
                progress(length)
    except OSError as error:
        return _finding(path, noun, error.strerror or repr(error), 0)
    return _finding(path, noun, "", size)


def _damage(entry: _Slice, *, is_archive: bool) -> str:
    """Return the damage of an entry; empty if it is good. Torch writes an archive that has a CRC
    for each record."""
    head = entry.read(4)
    if head != b"PK\x03\x04":
        if is_archive or (head and not head.strip(b"\0")):
            return "is no archive of torch" if head.strip(b"\0") else "is empty"
        return ""  # an entry in another format; only its presence can be verified
    entry.seek(0)
    try:
        with zipfile.ZipFile(entry) as archive:
            broken = archive.testzip()
    except OSError:
        raise  # an error of the file, not of its content
    except Exception as error:  # damaged bytes may raise any error in a parser
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

    def seek(self, offset: int, origin: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[origin])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        remaining = max(0, self._length - self._at)
        count: int = self._file.readinto(memoryview(buffer)[:remaining])
        self._at += count
        return count


def _to_dict(subject: Subject, finding: Finding) -> dict[str, Any]:
    values = {
        "kind": subject.kind,
        "path": str(finding.path),
        "what": finding.name,
        "bytes": finding.nbytes,
        "verdict": str(finding.verdict),
        "reason": finding.reason,
        "role": finding.role,
        "generation": finding.generation.to_list() if finding.generation else None,
    }
    return {key: value for key, value in values.items() if value not in (None, "")}


def _lines(subjects: Iterable[Subject], all_findings: list[tuple[Subject, Finding]]) -> list[str]:
    rows = []
    for subject in subjects:
        findings = [finding for owner, finding in all_findings if owner == subject]
        generations = sorted({f.generation for f in findings if f.generation is not None})
        for generation in [*reversed(generations), None]:
            group = [f for f in findings if f.generation == generation]
            rows += [_row(subject, generation, group)] if group else []
        if not findings:
            rows.append([f"{subject.kind} {subject.path}", "-", "-", "0", "0 B", "nothing sealed"])
    header = ("where", "generation", "roles", "parts", "size", "verdict")
    lines = table(header, rows)
    for _, finding in all_findings:
        if finding.verdict in (Verdict.BAD, Verdict.UNKNOWN):
            where = f"{finding.path}: {finding.name}"
            if finding.generation is not None:
                where += f" of {finding.generation.lineage}:{finding.generation.iteration}"
            lines.append(f"  {finding.verdict.upper()} {where}: {finding.reason}")
    return lines


def _row(subject: Subject, generation: Any, findings: list[Finding]) -> list[str]:
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    texts = [f"{n} {verdict}" for verdict, n in counts.items() if n and verdict is not Verdict.GOOD]
    roles = {finding.role for finding in findings if finding.role is not None}
    return [
        f"{subject.kind} {subject.path}",
        "-" if generation is None else f"{generation.lineage}:{generation.iteration}",
        str(len(roles)) if roles else "-",
        str(len(findings)),
        size(sum(finding.nbytes for finding in findings)),
        ", ".join(texts) or "good",
    ]


def _bytes_in(path: Path) -> int:
    """Return the bytes of a file or below a folder, including files that are not verified."""
    files = path.rglob("*") if path.is_dir() else [path]
    with contextlib.suppress(OSError):  # a live run removes files
        return sum(file.stat().st_size for file in files if file.is_file())
    return 0
