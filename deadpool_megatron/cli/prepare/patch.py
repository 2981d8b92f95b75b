"""Adds one import to four files of Megatron-LM, and one decorator above each function that deadpool
hooks. The code of the hooks is in this package. Without --deadpool on the command line the patched
functions behave as before.

The files have to be exactly those of a supported release; this is checked first. Then git apply
changes all of them, or none. DIR need not be a git checkout.

examples:
  git clone --depth 1 --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM
  deadpool patch check Megatron-LM     checks whether apply would work; writes nothing
  deadpool patch apply Megatron-LM     does nothing on a patched tree; finishes an interrupted apply
  deadpool patch status Megatron-LM    which files are patched, and where the patches are
  deadpool patch revert Megatron-LM    every file as it was, byte for byte

exit status: 0 done, or nothing to do; 2 refused, a line has the reason
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from deadpool_megatron.cli.common import CommandError, system_error_line, table
from deadpool_megatron.cli.examples import shipped_roots
from deadpool_megatron.observe.narration import count

# A patch set is a directory named after its tag, with patches and a table of hashes, which
# identifies the files of a tree.
_HASHES = "hashes"
_VERSION_FILE = "megatron/core/package_info.py"
_GIT_SECONDS = 60.0
_RELEASED, _PATCHED, _CHANGED, _MISSING = "released", "patched", "changed", "missing"
_OPTIONS = {"apply": (), "check": ("--check",), "revert": ("--reverse",)}


@dataclass(frozen=True)
class PatchSet:
    """The patches of a release. ``hashes``: for each file the hash in the release, and the hash
    with the patches, None if they do not change the file."""

    directory: Path
    hashes: dict[str, tuple[str, str | None]]

    @property
    def tag(self) -> str:
        """The tag of Megatron-LM that the patches are for."""
        return self.directory.name


@dataclass(frozen=True)
class Tree:
    """A user's tree, and the patch set that fits it best; ``files``: the state of each file."""

    root: Path
    patch_set: PatchSet
    files: dict[str, str] = field(repr=False)

    @property
    def patched_files(self) -> list[str]:
        """The files that the patches change."""
        return [name for name, (_, patched) in self.patch_set.hashes.items() if patched is not None]

    @property
    def state(self) -> str:
        """``released``, ``patched``, ``half-patched``, or ``unknown`` if a file that the patches
        change is neither released nor patched."""
        states = {self.files[name] for name in self.patched_files}
        if not states <= {_RELEASED, _PATCHED}:
            return "unknown"
        return "half-patched" if len(states) > 1 else states.pop()

    def files_not(self, wanted: str) -> list[str]:
        """The files that the patches change and that are not in the state ``wanted``."""
        return [name for name in self.patched_files if self.files[name] != wanted]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "action",
        choices=("apply", "check", "revert", "status"),
        metavar="apply|check|revert|status",
        help="patch; check whether apply would work; undo; show each file",
    )
    parser.add_argument("tree", type=Path, metavar="DIR", help="the checkout of Megatron-LM")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Carry out the action; with ``--json`` a refusal is an object, too."""
    try:
        tree = _read_tree(args.tree, find_patch_sets())
        text = _status(tree) if args.action == "status" else _change(tree, args.action)
        tree = _read_tree(tree.root, [tree.patch_set])
    except (CommandError, OSError) as error:
        line = system_error_line(error) if isinstance(error, OSError) else str(error)
        if args.json:
            print(json.dumps({"ok": False, "action": args.action, "error": line}))
        raise CommandError(line) from error
    facts = {
        "tree": str(tree.root),
        "state": tree.state,
        "tag": tree.patch_set.tag,
        "patches": str(tree.patch_set.directory),
        "files": tree.files,
        "apply_refused": _refusal_to_apply(tree),
    }
    print(json.dumps({"ok": True, "action": args.action, **facts}) if args.json else text)
    return 0


def _change(tree: Tree, action: str) -> str:
    """Patch or revert the tree, or with ``check`` test whether it can be patched; return a line.
    Raises CommandError."""
    # A revert only touches the patched files, so edits of other files do not prevent it.
    reverts = action == "revert"
    reason = _refusal(tree, tree.patched_files) if reverts else _refusal_to_apply(tree)
    if reason is not None:
        raise CommandError(reason)
    tag, wanted = tree.patch_set.tag, _RELEASED if reverts else _PATCHED
    names = tree.files_not(wanted)
    if not names:
        return f"nothing to do: {tree.root} is {wanted} already ({tag})"
    _git_apply(tree, names, _OPTIONS[action])
    if action == "check":
        return f"can be applied: {count(len(names), 'file')} of {tree.root} to patch ({tag})"
    if failed := _read_tree(tree.root, [tree.patch_set]).files_not(wanted):
        raise CommandError(
            f"the patches in {tree.patch_set.directory} do not make {failed[0]} what their table of"
            " hashes says: install the package again"
        )
    return f"{count(len(names), 'file')} of {tree.root} {wanted} now ({tag})"


def _status(tree: Tree) -> str:
    lines = [
        f"{tree.root}: {tree.state} (held against {tree.patch_set.tag})",
        *table(("file", "state"), list(tree.files.items())),
        f"patches: {tree.patch_set.directory}",
    ]
    if tree.state == "half-patched":
        lines.append("half-patched: 'deadpool patch apply' finishes it, 'revert' undoes it")
    if (reason := _refusal_to_apply(tree)) is not None:
        lines.append(f"apply would be refused: {reason}")
    return "\n".join(lines)


def patch_roots() -> list[Path]:
    """Return the directories that may hold patch sets."""
    return [root / "patches" for root in shipped_roots()]


def find_patch_sets() -> list[PatchSet]:
    """Return the patch sets of the first directory that has any. Raises CommandError."""
    for root in patch_roots():
        if tables := sorted(root.glob(f"*/{_HASHES}")):
            return [_read_patch_set(path) for path in tables]
    looked = ", ".join(map(str, patch_roots()))
    raise CommandError(f"no patch set is installed (looked in {looked}): install the package again")


def _read_patch_set(path: Path) -> PatchSet:
    rows = [line.split() for line in path.read_text().splitlines() if not line.startswith("#")]
    if any(len(row) != 3 for row in rows):
        raise CommandError(f"{path} is damaged: install the package again")
    hashes = {name: (old, None if new == "-" else new) for old, new, name in rows}
    return PatchSet(path.parent, hashes)


def _read_tree(root: Path, patch_sets: Iterable[PatchSet]) -> Tree:
    """Return the tree with the patch set that recognizes the most of its files. Raises CommandError
    if ``root`` is no tree of Megatron-LM.
    """
    if not root.is_dir():
        problem = "is not a directory" if root.exists() else "does not exist"
        raise CommandError(f"{root} {problem}: name a checkout of Megatron-LM")

    def count_recognized(tree: Tree) -> int:
        return sum(state in (_RELEASED, _PATCHED) for state in tree.files.values())

    trees = [
        Tree(root, each, {name: _state(root / name, *pair) for name, pair in each.hashes.items()})
        for each in patch_sets
    ]
    best = max(trees, key=count_recognized)
    if {best.files[name] for name in best.patched_files} == {_MISSING}:
        name = best.patched_files[0]
        raise CommandError(f"{root} is not a checkout of Megatron-LM: it has no {name}")
    return best


def _state(path: Path, released: str, patched: str | None) -> str:
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return _MISSING
    return {patched: _PATCHED, released: _RELEASED}.get(digest, _CHANGED)


def _refusal_to_apply(tree: Tree) -> str | None:
    # Many files of another release differ; name the version file first, as it explains the reason.
    return _refusal(tree, sorted(tree.files, key=lambda name: name != _VERSION_FILE))


def _refusal(tree: Tree, names: Iterable[str]) -> str | None:
    for name in names:
        if (state := tree.files[name]) in (_CHANGED, _MISSING):
            tag = tree.patch_set.tag
            return (
                f"{name} is {state}, not as {tag} has it with or without the patch: save your"
                f" changes and restore it, or use a checkout of {tag}"
            )
    return None


def _git_apply(tree: Tree, names: Iterable[str], options: Iterable[str]) -> None:
    """Apply the parts of the patches for the files ``names``. Raises CommandError."""
    # Hide the repository and the user's settings from git: in a repository, git silently skips
    # files outside of the current directory, and the settings could change its behaviour.
    environment = {name: value for name, value in os.environ.items() if name[:4] != "GIT_"}
    isolated = {"GIT_DIR": os.devnull, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    # Pass a single patch: of several, git applies some before it stops at an error.
    diff = b"".join(path.read_bytes() for path in sorted(tree.patch_set.directory.glob("*.patch")))
    included = [f"--include={name}" for name in names]
    try:
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", *options, *included, "-"],
            cwd=tree.root,
            env={**environment, **isolated, "LC_ALL": "C"},
            input=diff,
            capture_output=True,
            timeout=_GIT_SECONDS,
        )
    except FileNotFoundError as error:
        raise CommandError("git was not found: install it (sudo apt install git)") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"git apply in {tree.root} took over {_GIT_SECONDS:.0f} s") from error
    if done.returncode != 0:
        text = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise CommandError(
            f"git apply in {tree.root}: {text.splitlines()[0]}; 'deadpool patch status' shows what"
            " was changed"
        )
