"""A release in miniature with its patch set, and the ``deadpool patch`` command on it."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli import patching

REPOSITORY = Path(__file__).parents[2]
PATCHES = REPOSITORY / "patches"
MARKED = "from m import mark\n"

# A release in miniature: what each file holds without the patches and with them.
BEFORE = {
    "pkg/one.py": "import a\n\n\ndef f():\n    return 1\n",
    "pkg/two.py": "x = 1\r\ny = 'é'\n\ndef g():\n    return 2\n",
    "three.py": "z = 1\n\ndef h():\n    return 3\n",
}
AFTER = {
    name: MARKED + text.replace("def ", "@mark\ndef ").replace("return", "return ")
    for name, text in BEFORE.items()
}
MODES = {"pkg/one.py": 0o640, "pkg/two.py": 0o755, "three.py": 0o664}


def checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
        (root / name).chmod(MODES.get(name, 0o644))
    return root


def write_patch_set(
    directory: Path, tag: str = "v1", commit: str = "0" * 40, before: dict[str, str] = BEFORE
) -> Path:
    directory.mkdir(parents=True)
    patched = {}
    for number, (name, text) in enumerate(before.items()):
        old, new = text.encode(), AFTER[name].encode()
        diff = difflib.diff_bytes(
            difflib.unified_diff,
            old.splitlines(keepends=True),
            new.splitlines(keepends=True),
            f"a/{name}".encode(),
            f"b/{name}".encode(),
            n=1,
        )
        (directory / f"{number}.patch").write_bytes(b"For people.\n\n" + b"".join(diff))
        sums = {"before": checksum(old), "after": checksum(new)}
        patched[name] = {"patch": f"{number}.patch", **sums}
    manifest = {
        "tag": tag,
        "commit": commit,
        "patched": patched,
        "unpatched": {"main.py": checksum(b"run()\n")},
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


@pytest.fixture
def sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command finds its patch sets: one, for the release in miniature."""
    root = tmp_path / "sets"
    write_patch_set(root / "v1")
    monkeypatch.setattr(patching, "patch_roots", lambda: [tmp_path / "nothing-here", root])
    return root


@pytest.fixture
def tree(sets: Path) -> Path:
    """What the patch set in ``sets`` is for."""
    return write_tree(sets.parent / "tree", {**BEFORE, "main.py": "run()\n"})


def contents(root: Path) -> dict[str, tuple[bytes, int]]:
    """Every file outside .git, what it holds and its mode."""
    return {
        str(path.relative_to(root)): (path.read_bytes(), stat.S_IMODE(path.stat().st_mode))
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }


def patch(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["patch", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a refusal, after which the tree is as it was."""
    root = Path(str(arguments[-1]))
    before = contents(root)
    assert cli.main(["patch", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("deadpool patch: ")
    assert captured.err.count("\n") == 1
    assert contents(root) == before
    return captured.err


def facts(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(patch(capsys, *arguments, "--json"))
    assert values["ok"] is True
    return values


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    quiet = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(
        ["git", *identity, *arguments],
        cwd=root,
        env=quiet,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()
