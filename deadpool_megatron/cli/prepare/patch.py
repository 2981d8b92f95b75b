"""``deadpool patch``: put deadpool's marks into a checkout of Megatron-LM, or take them out.

``git apply`` does the work. A patch set is a directory named after the tag that it is for, with the
patches and one table of hashes; the table says what each file of a tree is.
"""

from __future__ import annotations

import argparse
import enum
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import CommandError, count, system_error_line, table
from deadpool_megatron.cli.examples import shipped_roots

_DESCRIPTION = """\
Adds one import to four files of Megatron-LM and one decorator above each function in which
deadpool takes part; what they do is in this package. Without --deadpool on the command line
the patched functions do what they did before.

The files have to be exactly those of a release that there are patches for, which is checked
first; git apply then changes all of them, or none. DIR need not be a git checkout.
"""
_EXAMPLES = """\
examples:
  git clone --depth 1 --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM
  deadpool patch check Megatron-LM     would it work? writes nothing
  deadpool patch apply Megatron-LM     once more does nothing; finishes what was cut short
  deadpool patch status Megatron-LM    which files are patched, and where the patches are
  deadpool patch revert Megatron-LM    every file as it was, byte for byte

exit status: 0 done, or nothing to do; 2 refused, one line says why
"""
_HASHES = "hashes"
_VERSION_FILE = "megatron/core/package_info.py"
_VERSION = re.compile(r"^MAJOR = (\d+)\nMINOR = (\d+)\nPATCH = (\d+)$", re.MULTILINE)
_GIT_SECONDS = 60.0


class FileState(enum.StrEnum):
    """One file, held against the table of hashes."""

    RELEASED = "released"
    PATCHED = "patched"
    CHANGED = "changed"
    MISSING = "missing"


@dataclass(frozen=True)
class PatchSet:
    """The patches for one release: the hash of each file without them, and with them if patched."""

    directory: Path
    hashes: dict[str, tuple[str, str | None]]

    @property
    def tag(self) -> str:
        """The tag of Megatron-LM that the patches are for."""
        return self.directory.name


@dataclass(frozen=True)
class Tree:
    """A user's tree, and the patch set that fits it best."""

    root: Path
    patch_set: PatchSet
    files: dict[str, FileState] = field(repr=False)

    @property
    def patched_files(self) -> dict[str, FileState]:
        """The files that the patches change."""
        hashes = self.patch_set.hashes
        return {name: state for name, state in self.files.items() if hashes[name][1] is not None}

    @property
    def state(self) -> str:
        """``released``, ``patched``, ``half-patched``, or ``unknown`` when a file is neither."""
        states = set(self.patched_files.values())
        if not states <= {FileState.RELEASED, FileState.PATCHED}:
            return "unknown"
        return "half-patched" if len(states) > 1 else str(states.pop())

    def files_not(self, wanted: FileState) -> list[str]:
        """The patched files that are in another state."""
        return [name for name, state in self.patched_files.items() if state is not wanted]


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = subparsers.add_parser(
        "patch",
        help="put the marks into a checkout of Megatron-LM, or take them out",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
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
        tree = read_tree(args.tree, find_patch_sets())
        said = actions[args.action](tree)
        facts = _facts(read_tree(tree.root, [tree.patch_set]))
    except (CommandError, OSError) as error:
        line = system_error_line(error) if isinstance(error, OSError) else str(error)
        if args.json:
            print(json.dumps({"ok": False, "action": args.action, "error": line}))
        raise CommandError(line) from error
    if args.json:
        print(json.dumps({"ok": True, "action": args.action, **facts}))
    else:
        print("\n".join(said))
    return 0


def _apply(tree: Tree) -> list[str]:
    _refuse(_refusal_to_apply(tree))
    tag, left = tree.patch_set.tag, tree.files_not(FileState.PATCHED)
    if not left:
        return [f"nothing to do: {tree.root} is patched already ({tag})"]
    _git_apply(tree, left)
    _confirm(tree, FileState.PATCHED)
    return [f"{count(len(left), 'file')} of {tree.root} patched ({tag})"]


def _check(tree: Tree) -> list[str]:
    _refuse(_refusal_to_apply(tree))
    tag, left = tree.patch_set.tag, tree.files_not(FileState.PATCHED)
    if not left:
        return [f"{tree.root} is patched already ({tag})"]
    _git_apply(tree, left, "--check")
    return [f"can be applied: {count(len(left), 'file')} of {tree.root} to patch ({tag})"]


def _revert(tree: Tree) -> list[str]:
    # Only the patched files matter: their hashes say that they go back to what they were, whatever
    # else has been checked out or edited since.
    _refuse(_refusal_of_files(tree, tree.patched_files))
    tag, left = tree.patch_set.tag, tree.files_not(FileState.RELEASED)
    if not left:
        return [f"nothing to do: {tree.root} is not patched ({tag})"]
    _git_apply(tree, left, "--reverse")
    _confirm(tree, FileState.RELEASED)
    return [f"{count(len(left), 'file')} of {tree.root} as released again ({tag})"]


def _status(tree: Tree) -> list[str]:
    lines = [
        f"{tree.root}: {tree.state} (held against {tree.patch_set.tag})",
        *table(("file", "state"), [(name, state) for name, state in tree.files.items()]),
        f"patches: {tree.patch_set.directory}",
    ]
    if tree.state == "half-patched":
        lines.append("half-patched: 'deadpool patch apply' finishes it, 'revert' undoes it")
    refusal = _refusal_to_apply(tree)
    if refusal is not None:
        lines.append(f"apply would be refused: {refusal}")
    return lines


def _facts(tree: Tree) -> dict[str, Any]:
    return {
        "tree": str(tree.root),
        "state": tree.state,
        "tag": tree.patch_set.tag,
        "patches": str(tree.patch_set.directory),
        "files": tree.files,
        "apply_refused": _refusal_to_apply(tree),
    }


def patch_roots() -> list[Path]:
    """Return where patch sets can be."""
    return [root / "patches" for root in shipped_roots()]


def find_patch_sets() -> list[PatchSet]:
    """Return the patch sets of the first place that has any; raise CommandError if none has."""
    for root in patch_roots():
        tables = sorted(root.glob(f"*/{_HASHES}"))
        if tables:
            return [_read_patch_set(path) for path in tables]
    looked = ", ".join(map(str, patch_roots()))
    raise CommandError(f"no patch set is installed (looked in {looked}): install the package again")


def _read_patch_set(path: Path) -> PatchSet:
    hashes: dict[str, tuple[str, str | None]] = {}
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            try:
                released, patched, name = line.split(maxsplit=2)
            except ValueError as error:
                raise CommandError(f"{path} is damaged: install the package again") from error
            hashes[name] = (released, None if patched == "-" else patched)
    return PatchSet(path.parent, hashes)


def read_tree(root: Path, patch_sets: Sequence[PatchSet]) -> Tree:
    """Return the tree beside the patch set that knows most of its files.

    Raises CommandError when ``root`` is no tree of Megatron-LM.
    """
    if not root.is_dir():
        wrong = "is not a directory" if root.exists() else "does not exist"
        raise CommandError(f"{root} {wrong}: name a checkout of Megatron-LM")
    trees = [Tree(root, each, _states(root, each)) for each in patch_sets]
    best = max(trees, key=_known)
    if set(best.patched_files.values()) == {FileState.MISSING}:
        name = next(iter(best.patched_files))
        raise CommandError(f"{root} is not a checkout of Megatron-LM: it has no {name}")
    return best


def _known(tree: Tree) -> int:
    return sum(state in (FileState.RELEASED, FileState.PATCHED) for state in tree.files.values())


def _states(root: Path, patch_set: PatchSet) -> dict[str, FileState]:
    states = {}
    for name, (released, patched) in patch_set.hashes.items():
        try:
            digest = hashlib.sha256((root / name).read_bytes()).hexdigest()
        except (FileNotFoundError, NotADirectoryError):
            states[name] = FileState.MISSING
            continue
        meanings = {patched: FileState.PATCHED, released: FileState.RELEASED}
        states[name] = meanings.get(digest, FileState.CHANGED)
    return states


def _refuse(refusal: str | None) -> None:
    if refusal is not None:
        raise CommandError(refusal)


def _refusal_to_apply(tree: Tree) -> str | None:
    # A tree of another release differs in much; its version says more than any one file.
    return _refusal_of_files(tree, sorted(tree.files, key=lambda name: name != _VERSION_FILE))


def _refusal_of_files(tree: Tree, names: Sequence[str] | dict[str, FileState]) -> str | None:
    tag = tree.patch_set.tag
    for name in names:
        state = tree.files[name]
        if state in (FileState.RELEASED, FileState.PATCHED):
            continue
        version = _version(tree)
        if version is not None:
            return f"{name} is not that of {tag} (this is {version}): use a checkout of {tag}"
        if state is FileState.MISSING:
            return f"{name} is missing in {tree.root}: put it back as {tag} has it"
        if name not in tree.patched_files:
            return f"{name} is not that of {tag}: put it back; changes can live in a copy of it"
        return (
            f"{name} has other changes than the patch: save them, then put it back as {tag} has it"
        )
    return None


def _version(tree: Tree) -> str | None:
    """The version of a tree of another release, else None."""
    if tree.files.get(_VERSION_FILE) is not FileState.CHANGED:
        return None
    found = _VERSION.search((tree.root / _VERSION_FILE).read_text(errors="replace"))
    version = ".".join(found.groups()) if found is not None else ""
    return None if not version or tree.patch_set.tag.endswith(f"v{version}") else version


def _git_apply(tree: Tree, names: Sequence[str], *options: str) -> None:
    # Inside a repository git silently leaves out files that are not below the directory of the
    # call, and obeys settings of the user. With no repository and no settings it does neither.
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    alone = {"GIT_DIR": os.devnull, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    # As one patch: of several files on its command line git applies some and then stops.
    diff = b"".join(path.read_bytes() for path in sorted(tree.patch_set.directory.glob("*.patch")))
    included = [f"--include={name}" for name in names]
    try:
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", *options, *included, "-"],
            cwd=tree.root,
            env={**environment, **alone, "LC_ALL": "C"},
            input=diff,
            capture_output=True,
            timeout=_GIT_SECONDS,
        )
    except FileNotFoundError as error:
        raise CommandError("git was not found: install it (sudo apt install git)") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"git apply in {tree.root} took over {_GIT_SECONDS:.0f} s") from error
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [
            f"exit status {done.returncode}"
        ]
        raise CommandError(
            f"git apply in {tree.root}: {said[0]}; 'deadpool patch status' shows what was changed"
        )


def _confirm(tree: Tree, wanted: FileState) -> None:
    left = read_tree(tree.root, [tree.patch_set]).files_not(wanted)
    if left:
        raise CommandError(
            f"the patches in {tree.patch_set.directory} do not make {left[0]} what their table of"
            " hashes says: install the package again"
        )
