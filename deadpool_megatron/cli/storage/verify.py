"""``deadpool verify``: do all generations, in memory and on disk, still have the bytes they had?"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, size, table
from deadpool_megatron.cli.storage import checkpoint_files
from deadpool_megatron.cluster.run_directory.cleanup import node_directories
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json
from deadpool_megatron.events import Kind, read_events
from deadpool_megatron.persist import frozen_folder
from deadpool_megatron.vault.shm.verify import (
    Finding,
    Meter,
    Progress,
    Verdict,
    segment_files,
    verify_segment,
)

EXIT_BAD, EXIT_NOT_VERIFIED = 1, 2
_DESCRIPTION = """\
Hashes every sealed part of every generation and compares it with its checksum. Read-only: a run
that is alive is not disturbed, and a slot that it is just overwriting counts as busy, not as bad.

DIR may be
  a run directory      all of the run's memory on this host, its dumps, its durable checkpoints,
                       what --resume goes on from, its frozen weights
  /dev/shm/deadpool-*  (or nodeN in it) generations in memory
  a dump               what vaults wrote when a run ended for want of nodes (RUN/dump/...)
  a checkpoint         torch_dist, or a folder of such: the index can be read, each file and byte
                       range that it names is there, and the checksums inside match"""
_EXAMPLES = """\
examples:
  deadpool verify /shared/run1
  deadpool verify --json /dev/shm/deadpool-3f9c21ab/node3
  deadpool verify /shared/saves/iter_0001000
  srun --ntasks-per-node=1 deadpool verify RUN        the memory of all nodes

exit status: 0 all good; 1 something is bad (named in the last lines); 2 bad input, nothing to
verify in DIR, or something that this version does not know and could not verify"""


@dataclass(frozen=True)
class Target:
    """One directory (or file) to look at, and how."""

    kind: str
    path: Path
    verify: Callable[[Path, Progress], Iterator[Finding]]


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "verify",
        help="check the checksums of all generations, in memory and on disk",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="see above")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Verify and say what was found."""
    targets = find_targets(args.directory)
    found: list[tuple[Target, Finding]] = []
    meter = Meter(_show if sys.stderr.isatty() and not args.json else lambda _: None)
    for target in targets:
        found += [(target, finding) for finding in target.verify(target.path, meter)]
    verdicts = {finding.verdict for _, finding in found}
    status = EXIT_NOT_VERIFIED if Verdict.UNKNOWN in verdicts else 0
    status = EXIT_BAD if Verdict.BAD in verdicts else status
    if args.json:
        print(json.dumps({"ok": not status, "findings": [_to_dict(t, f) for t, f in found]}))
    else:
        print("\n".join(_lines(targets, found)))
    return status


def find_targets(directory: Path) -> list[Target]:
    """Return what is to be verified in a directory. Raises CommandError when there is nothing."""
    if not directory.is_dir():
        raise CommandError(f"{directory} is not a directory")
    found = list(dict.fromkeys(_targets(directory)))
    if not found:
        raise CommandError(
            f"{directory} holds nothing to verify: name a run directory, /dev/shm/deadpool-...,"
            " a dump, or a torch_dist checkpoint"
        )
    return found


def _targets(directory: Path) -> Iterator[Target]:
    if (directory / "run.json").exists():
        yield from _of_run(RunDirectory(directory))
    elif (directory / checkpoint_files.METADATA).exists():
        yield Target("checkpoint", directory, checkpoint_files.verify_checkpoint)
    elif files := segment_files(directory):
        dumped = all(path.name.startswith("dump-") for path in files)
        yield Target("dump" if dumped else "memory", directory, _segments)
    else:
        below = sorted(path for path in directory.iterdir() if path.is_dir())
        for path in below:
            if (path / checkpoint_files.METADATA).exists() or segment_files(path):
                yield from _targets(path)


def _of_run(run: RunDirectory) -> Iterator[Target]:
    dumps = sorted(run.dump.glob("*")) if run.dump.is_dir() else []
    for kind, paths in (("memory", node_directories(run.read_run().run_id)), ("dump", dumps)):
        yield from (Target(kind, path, _segments) for path in paths if segment_files(path))
    for path in dict.fromkeys(_durable(run)):
        if path.is_dir():
            yield Target("checkpoint", path, checkpoint_files.verify_checkpoint)
    if run.latest.exists():
        yield Target("latest", run.latest, _latest)
    if frozen_folder.files_in(run.frozen):
        yield Target("frozen", run.frozen, _frozen)


def _segments(directory: Path, progress: Progress) -> Iterator[Finding]:
    for path in segment_files(directory):
        yield from verify_segment(path, progress)


def _frozen(folder: Path, progress: Progress) -> Iterator[Finding]:
    for path in frozen_folder.files_in(folder):
        trouble = frozen_folder.trouble_with(path, progress)
        verdict = Verdict.BAD if trouble else Verdict.GOOD
        yield Finding(path, "frozen weights", path.stat().st_size, verdict, trouble)


def _latest(path: Path, _: Progress) -> Iterator[Finding]:
    trouble = _trouble_with_latest(path)
    verdict = Verdict.BAD if trouble else Verdict.GOOD
    yield Finding(path, "what --resume goes on from", 0, verdict, trouble)


def _durable(run: RunDirectory) -> Iterator[Path]:
    """Those that were ever written. Older ones may have been removed since, by whoever trains."""
    for event in read_events(run.events):
        if event.kind is Kind.DURABLE and "path" in event.data:
            yield Path(str(event.data["path"]))
    with contextlib.suppress(OSError, ValueError, KeyError, RecursionError):  # said of the file
        newest = read_json(run.latest)
        if newest.get("kind") == "durable":
            yield Path(str(newest["path"]))


def _trouble_with_latest(path: Path) -> str:
    """Return why no other run could continue from what it names; empty if one can."""
    try:
        newest = read_json(path)
    except OSError as error:
        return str(error.strerror)
    except (ValueError, RecursionError) as error:
        return f"cannot be read: {error}"
    if newest.get("kind") not in ("durable", "dump"):
        return ""
    named = newest.get("path")
    if not isinstance(named, str):
        return "names no path"
    return "" if Path(named).is_dir() else f"names {named}, which is not there"


def _to_dict(target: Target, finding: Finding) -> dict[str, Any]:
    values = {
        "kind": target.kind,
        "path": str(finding.path),
        "what": finding.what,
        "bytes": finding.nbytes,
        "verdict": str(finding.verdict),
        "reason": finding.reason,
        "role": finding.role,
        "generation": finding.generation.to_list() if finding.generation else None,
    }
    return {key: value for key, value in values.items() if value not in (None, "")}


def _lines(targets: Iterable[Target], found: list[tuple[Target, Finding]]) -> list[str]:
    rows = []
    for target in targets:
        mine = [finding for of, finding in found if of == target]
        generations = sorted({f.generation for f in mine if f.generation is not None})
        for generation in [*reversed(generations), None]:
            those = [f for f in mine if f.generation == generation]
            if those:
                rows.append(_row(target, generation, those))
        if not mine:
            rows.append([f"{target.kind} {target.path}", "-", "-", "0", "0 B", "nothing sealed"])
    header = ("where", "generation", "roles", "parts", "size", "verdict")
    lines = table(header, rows)
    for _, finding in found:
        if finding.verdict in (Verdict.BAD, Verdict.UNKNOWN):
            where = f"{finding.path}: {finding.what}"
            if finding.generation is not None:
                where += f" of {finding.generation.lineage}:{finding.generation.iteration}"
            lines.append(f"  {finding.verdict.upper()} {where}: {finding.reason}")
    return lines


def _row(target: Target, generation: Any, findings: list[Finding]) -> list[str]:
    counts = {verdict: sum(f.verdict is verdict for f in findings) for verdict in Verdict}
    shown = [f"{n} {verdict}" for verdict, n in counts.items() if n and verdict is not Verdict.GOOD]
    roles = {finding.role for finding in findings if finding.role is not None}
    return [
        f"{target.kind} {target.path}",
        "-" if generation is None else f"{generation.lineage}:{generation.iteration}",
        str(len(roles)) if roles else "-",
        str(len(findings)),
        size(sum(finding.nbytes for finding in findings)),
        ", ".join(shown) or "good",
    ]


def _show(done_bytes: int) -> None:
    print(f"\r{size(done_bytes)}\r", end="", file=sys.stderr, flush=True)
