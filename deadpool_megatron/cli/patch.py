"""``deadpool patch``: put deadpool's marks into a checkout of Megatron-LM, or take them out."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron.cli import patching
from deadpool_megatron.cli.common import CommandError, raw
from deadpool_megatron.cli.patching import FileState, Tree, TreeState
from deadpool_megatron.cli.tables import count, table

_DESCRIPTION = """\
Adds one import to four files of Megatron-LM and one decorator above each function in which
deadpool takes part; what they do is in this package. Without --deadpool on the command line
the patched functions do what they did before.

The tree has to be exactly a release that there are patches for (a git checkout: of that tag),
which is checked first. It is never left with a half-written file.
"""
_EXAMPLES = """\
examples:
  git clone --depth 1 --branch core_v0.16.1 https://github.com/NVIDIA/Megatron-LM
  deadpool patch check Megatron-LM     would it work? writes nothing
  deadpool patch apply Megatron-LM     once more does nothing; finishes what was cut short
  deadpool patch status Megatron-LM    which files are patched, and where the patches are
  deadpool patch revert Megatron-LM    every file as it was, byte for byte

exit status: 0 done, or nothing to do; 2 refused, one line says why
"""


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = raw(
        subparsers.add_parser(
            "patch",
            help="put the marks into a checkout of Megatron-LM, or take them out",
            description=_DESCRIPTION,
            epilog=_EXAMPLES,
        )
    )
    parser.add_argument(
        "action",
        choices=("apply", "check", "revert", "status"),
        metavar="apply|check|revert|status",
        help="patch; say whether apply would work; undo; show each file",
    )
    parser.add_argument("tree", type=Path, metavar="DIR", help="the checkout of Megatron-LM")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Carry out the action; with ``--json`` a refusal is an object as well."""
    actions = {"apply": _apply, "check": _check, "revert": _revert, "status": _status}
    try:
        tree = patching.read_tree(args.tree, patching.find_patch_sets())
        said = actions[args.action](tree)
        # Read again: what is there now, not what was meant to be.
        facts = _facts(patching.read_tree(tree.root, [tree.patch_set]))
    except (CommandError, OSError) as error:
        line = str(error)
        if isinstance(error, OSError) and error.filename:
            line = f"{error.filename}: {error.strerror}"
        if args.json:
            print(json.dumps({"ok": False, "action": args.action, "error": line}))
        raise CommandError(line) from error
    if args.json:
        print(json.dumps({"ok": True, "action": args.action, **facts}))
    else:
        print("\n".join(said))
    return 0


def _apply(tree: Tree) -> list[str]:
    _refuse(patching.refusal_to_apply(tree))
    written = _bring_to(tree, FileState.PATCHED)
    if not written:
        return [f"nothing to do: {tree.root} is patched already ({tree.patch_set.tag})"]
    return [f"{count(written, 'file')} of {tree.root} patched ({tree.patch_set.tag})"]


def _revert(tree: Tree) -> list[str]:
    _refuse(patching.refusal_to_revert(tree))
    written = _bring_to(tree, FileState.RELEASED)
    if not written:
        return [f"nothing to do: {tree.root} is not patched ({tree.patch_set.tag})"]
    return [f"{count(written, 'file')} of {tree.root} as released again ({tree.patch_set.tag})"]


def _check(tree: Tree) -> list[str]:
    _refuse(patching.refusal_to_apply(tree))
    left = len(patching.new_contents(tree, FileState.PATCHED))
    if not left:
        return [f"{tree.root} is patched already ({tree.patch_set.tag})"]
    return [f"can be applied: {count(left, 'file')} of {tree.root} to patch ({tree.patch_set.tag})"]


def _status(tree: Tree) -> list[str]:
    by = f"commit {tree.head[:12]}" if tree.head else "no git, known by its files"
    lines = [
        f"{tree.root}: {tree.state} (held against {tree.patch_set.tag}; {by})",
        *table(("file", "state"), [(name, state) for name, state in tree.files.items()]),
        f"patches: {tree.patch_set.directory}",
    ]
    if tree.state is TreeState.HALF:
        lines.append("half-patched: 'deadpool patch apply' finishes it, 'revert' undoes it")
    refusal = patching.refusal_to_apply(tree)
    if refusal is not None:
        lines.append(f"apply would be refused: {refusal}")
    return lines


def _facts(tree: Tree) -> dict[str, Any]:
    return {
        "tree": str(tree.root),
        "state": tree.state,
        "tag": tree.patch_set.tag,
        "commit": tree.patch_set.commit,
        "head": tree.head,
        "patches": str(tree.patch_set.directory),
        "files": tree.files,
        "apply_refused": patching.refusal_to_apply(tree),
    }


def _refuse(refusal: str | None) -> None:
    if refusal is not None:
        raise CommandError(refusal)


def _bring_to(tree: Tree, wanted: FileState) -> int:
    contents = patching.new_contents(tree, wanted)
    _remove_leftovers(tree.path(file.name) for file in tree.patch_set.patched)
    _replace_all(contents)
    return len(contents)


def _replace_all(contents: Mapping[Path, bytes]) -> None:
    """Everything is on the disk beside its target before the first target changes."""
    beside: dict[Path, Path] = {}
    told = "nothing was changed"
    try:
        for path, content in contents.items():
            descriptor, name = tempfile.mkstemp(prefix=_prefix(path), dir=path.parent)
            beside[path] = Path(name)
            with open(descriptor, "wb") as file:
                file.write(content)
                _make_like(file.fileno(), path.stat())
                file.flush()
                os.fsync(file.fileno())
        told = "'deadpool patch status' shows what was changed before"
        for path, temporary in beside.items():
            temporary.replace(path)
        for directory in {path.parent for path in contents}:
            _sync_directory(directory)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror}; {told}") from error
    finally:
        for temporary in beside.values():
            temporary.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name}.deadpool-"


def _make_like(descriptor: int, known: os.stat_result) -> None:
    # Only root can give files away; for others the file becomes theirs.
    with contextlib.suppress(PermissionError):
        os.fchown(descriptor, known.st_uid, known.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(known.st_mode))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(paths: Iterable[Path]) -> None:
    """Of a run that was killed before its renames."""
    for path in paths:
        for leftover in path.parent.glob(f"{_prefix(path)}*"):
            leftover.unlink(missing_ok=True)
