"""Patch sets for Megatron-LM, and what a tree is in their light. Nothing here writes.

A patch set is a directory with one diff per file and ``manifest.json``: the tag and commit that it
is for, and the checksum of each file before and after. ``unpatched`` names files that are left as
they are but must be those of the tag: the entry script, and the one that holds the version number,
as two releases can agree in every patched file.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import re
import site
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import deadpool_megatron
from deadpool_megatron.cli import diffs
from deadpool_megatron.cli.common import CommandError

_MANIFEST = "manifest.json"
_VERSION_FILE = "megatron/core/package_info.py"
_VERSION = re.compile(r"^MAJOR = (\d+)\nMINOR = (\d+)\nPATCH = (\d+)$", re.MULTILINE)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class FileState(enum.StrEnum):
    """One file, held against the manifest."""

    RELEASED = "released"
    PATCHED = "patched"
    CHANGED = "changed"
    MISSING = "missing"


class TreeState(enum.StrEnum):
    """All patched files together."""

    RELEASED = "released"
    PATCHED = "patched"
    HALF = "half-patched"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class PatchedFile:
    """The diff of one file, and its checksums (SHA-256) without and with it."""

    name: str
    diff: str
    before: str
    after: str


@dataclass(frozen=True)
class PatchSet:
    """The patches for one release of Megatron-LM."""

    directory: Path
    tag: str
    commit: str
    patched: tuple[PatchedFile, ...]
    unpatched: dict[str, str]


@dataclass(frozen=True)
class Tree:
    """A user's tree and the patch set that suits it best.

    ``head``: the commit that git has checked out; None where there is no git to ask.
    """

    root: Path
    patch_set: PatchSet
    head: str | None
    files: dict[str, FileState] = field(repr=False)

    @property
    def state(self) -> TreeState:
        """What the patched files say; a file that is not patched does not count here."""
        states = {self.files[file.name] for file in self.patch_set.patched}
        if not states <= {FileState.RELEASED, FileState.PATCHED}:
            return TreeState.UNKNOWN
        return TreeState.HALF if len(states) > 1 else TreeState(states.pop())

    def path(self, name: str) -> Path:
        """The file itself, behind any links inside the tree."""
        return _inside(self.root, name)

    def files_not(self, wanted: FileState) -> list[PatchedFile]:
        """The patched files that are in another state."""
        return [file for file in self.patch_set.patched if self.files[file.name] is not wanted]


def patch_roots() -> list[Path]:
    """Where patch sets can be: beside the package in its repository, else where pip puts data."""
    prefixes = [sys.prefix, sysconfig.get_path("data"), site.getuserbase()]
    repository = Path(deadpool_megatron.__file__).parents[1] / "patches"
    return [repository, *(Path(p) / "share" / "deadpool_megatron" / "patches" for p in prefixes)]


def find_patch_sets() -> list[PatchSet]:
    """The patch sets of the first place that has any."""
    for root in patch_roots():
        manifests = sorted(root.glob(f"*/{_MANIFEST}"))
        if manifests:
            return [_read_patch_set(manifest) for manifest in manifests]
    looked = ", ".join(map(str, dict.fromkeys(patch_roots())))
    raise CommandError(f"no patch set is installed (looked in {looked}): install the package again")


def _read_patch_set(manifest: Path) -> PatchSet:
    try:
        values = json.loads(manifest.read_text())
        patched = [
            PatchedFile(name, str(file["patch"]), str(file["before"]), str(file["after"]))
            for name, file in values["patched"].items()
        ]
        unpatched = {str(name): str(checksum) for name, checksum in values["unpatched"].items()}
        tag, commit = str(values["tag"]), str(values["commit"])
        if not patched:
            raise ValueError("no patched file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CommandError(f"{manifest} is damaged: install the package again") from error
    return PatchSet(manifest.parent, tag, commit, tuple(patched), unpatched)


def read_tree(root: Path, patch_sets: Sequence[PatchSet]) -> Tree:
    """The tree in the light of the patch set for its commit, else of the one it is most like."""
    if not root.is_dir():
        wrong = "is not a directory" if root.exists() else "does not exist"
        raise CommandError(f"{root} {wrong}: name a checkout of Megatron-LM")
    head = head_commit(root)
    trees = [Tree(root, patch_set, head, _states(root, patch_set)) for patch_set in patch_sets]
    best = max(trees, key=lambda tree: (tree.patch_set.commit == head, _known(tree)))
    if {best.files[file.name] for file in best.patch_set.patched} == {FileState.MISSING}:
        name = best.patch_set.patched[0].name
        raise CommandError(f"{root} is not a checkout of Megatron-LM: it has no {name}")
    return best


def _known(tree: Tree) -> int:
    return sum(s in (FileState.RELEASED, FileState.PATCHED) for s in tree.files.values())


def _states(root: Path, patch_set: PatchSet) -> dict[str, FileState]:
    states = {}
    for file in patch_set.patched:
        meanings = {file.after: FileState.PATCHED, file.before: FileState.RELEASED}
        states[file.name] = _state(root, file.name, meanings)
    for name, checksum in patch_set.unpatched.items():
        states[name] = _state(root, name, {checksum: FileState.RELEASED})
    return states


def _state(root: Path, name: str, meanings: dict[str, FileState]) -> FileState:
    try:
        content = _inside(root, name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return FileState.MISSING
    return meanings.get(_checksum(content), FileState.CHANGED)


def _inside(root: Path, name: str) -> Path:
    # os.path, as Path.resolve raises an error of its own for links that go in circles.
    top, path = os.path.realpath(root), os.path.realpath(root / name)
    if os.path.commonpath([top, path]) != top:
        raise CommandError(
            f"{name} is a link that leads out of {root}, to {path}: patch the tree that holds it"
        )
    return Path(path)


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def head_commit(root: Path) -> str | None:
    """The commit that is checked out; None without git, or where its files do not say.

    Read without git, which need not be installed where one trains, and which refuses to look at a
    checkout that belongs to another user.
    """
    try:
        git = root / ".git"
        if git.is_file():  # of a worktree or a submodule; dangling once copied elsewhere
            git = root / git.read_text().removeprefix("gitdir:").strip()
        head = (git / "HEAD").read_text().strip()
        if head.startswith("ref:"):
            shared = git / "commondir"
            common = git / shared.read_text().strip() if shared.exists() else git
            head = _resolve_ref(common, head.removeprefix("ref:").strip())
    except (OSError, ValueError):
        return None
    return head if _COMMIT.fullmatch(head) else None


def _resolve_ref(git: Path, ref: str) -> str:
    if (git / ref).is_file():
        return (git / ref).read_text().strip()
    for line in (git / "packed-refs").read_text().splitlines():
        commit, _, name = line.partition(" ")
        if name == ref:
            return commit
    return ""


def refusal_to_apply(tree: Tree) -> str | None:
    """Why the patches cannot go in, and what to do about it; None when they can."""
    patch_set = tree.patch_set
    if tree.head is not None and tree.head != patch_set.commit:
        return (
            f"HEAD of {tree.root} is {tree.head[:12]}{_version(tree)}, not {patch_set.tag}"
            f" ({patch_set.commit[:12]}): git -C {tree.root} checkout {patch_set.tag}"
        )
    # A tree of another release differs in much; its version says more than any one file.
    names = sorted(tree.files, key=lambda name: name != _VERSION_FILE)
    for name in names:
        if tree.files[name] in (FileState.CHANGED, FileState.MISSING):
            return _refusal_of(tree, name)
    return _refusal_to_write(tree, FileState.PATCHED)


def refusal_to_revert(tree: Tree) -> str | None:
    """Why the patches cannot be taken out; None when they can.

    Only the patched files matter here: their checksums alone say that they go back to what they
    were, whatever else has been checked out or edited since.
    """
    for file in tree.patch_set.patched:
        if tree.files[file.name] in (FileState.CHANGED, FileState.MISSING):
            return _refusal_of(tree, file.name)
    return _refusal_to_write(tree, FileState.RELEASED)


def _refusal_of(tree: Tree, name: str) -> str:
    tag = tree.patch_set.tag
    version = _version(tree)
    if version:
        return f"{name} is not that of {tag}{version}: use a checkout of {tag}"
    back = f"put it back as {tag} has it"
    if tree.head is not None:
        back += f" (git -C {tree.root} checkout {tree.patch_set.commit[:12]} -- {name})"
    if tree.files[name] is FileState.MISSING:
        return f"{name} is missing in {tree.root}: {back}"
    if name in tree.patch_set.unpatched:
        return f"{name} is not that of {tag}: {back}; changes of yours can live in a copy of it"
    return f"{name} has other changes than the patch: save them, then {back}"


def _version(tree: Tree) -> str:
    """`` (this is 0.15.3)`` in a tree of another release, else nothing."""
    if tree.files.get(_VERSION_FILE) is not FileState.CHANGED:
        return ""
    found = _VERSION.search(tree.path(_VERSION_FILE).read_text(errors="replace"))
    if found is None or tree.patch_set.tag.endswith("v" + ".".join(found.groups())):
        return ""
    return f" (this is {'.'.join(found.groups())})"


def _refusal_to_write(tree: Tree, wanted: FileState) -> str | None:
    for file in tree.files_not(wanted):
        directory = tree.path(file.name).parent
        if not os.access(directory, os.W_OK | os.X_OK):
            return f"{directory} is not writable: become its owner, or copy the tree"
    return None


def new_contents(tree: Tree, wanted: FileState) -> dict[Path, bytes]:
    """What to write where so that every patched file is in the wanted state; all of it verified."""
    contents = {}
    reverse = wanted is FileState.RELEASED
    for file in tree.files_not(wanted):
        path = tree.path(file.name)
        diff = tree.patch_set.directory / file.diff
        try:
            hunks = diffs.parse(diff.read_bytes())
            content = diffs.apply(hunks, path.read_bytes(), reverse=reverse)
        except diffs.DiffError as error:
            raise CommandError(f"{diff}: {error}; install the package again") from error
        if _checksum(content) != (file.before if reverse else file.after):
            raise CommandError(f"{diff} is not the one of the manifest: install the package again")
        contents[path] = content
    return contents
