"""``deadpool patch``: in and out byte for byte, only where it belongs, wherever the tree lies."""

import ast
import difflib
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli.prepare import patch as command
from deadpool_megatron.hookpoints import points_of
from tests.megatron_lm.harness.checkout import TAGS, checkout

REPOSITORY = Path(__file__).parents[3]
PATCHES = REPOSITORY / "patches"
MARKED = "from m import mark\n"
# A release in miniature: what each file holds without the patches and with them.
BEFORE = {
    "pkg/one.py": "import a\n\n\ndef f():\n    return 1\n",
    "pkg/two.py": "x = 1\r\ny = 'é'\n\ndef g():\n    return 2\n",
    "three.py": "z = 1\n\ndef h():\n    return 3\n",
}
AFTER = {name: MARKED + text.replace("def ", "@mark\ndef ") for name, text in BEFORE.items()}


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
    return root


def write_patch_set(directory: Path, before: dict[str, str] = BEFORE) -> Path:
    directory.mkdir(parents=True)
    rows = ["# a table", f"{hashlib.sha256(b'run()').hexdigest()} - main.py"]
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
        rows.append(" ".join([*(hashlib.sha256(text).hexdigest() for text in (old, new)), name]))
    (directory / "hashes").write_text("\n".join(rows) + "\n")
    return directory


@pytest.fixture
def sets(tmp_path, monkeypatch):
    """Where the command finds its patch sets: one, for the release in miniature."""
    root = tmp_path / "sets"
    write_patch_set(root / "v1")
    monkeypatch.setattr(command, "patch_roots", lambda: [tmp_path / "nothing-here", root])
    return root


@pytest.fixture
def tree(sets):
    """What the patch set in ``sets`` is for."""
    return write_tree(sets.parent / "tree", {**BEFORE, "main.py": "run()"})


def contents(root: Path) -> dict[str, bytes]:
    """Every file outside .git."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }


Patch = Callable[..., str]
Facts = Callable[..., dict[str, Any]]


@pytest.fixture
def patch(carry_out):
    """Have something done; answers what is said."""

    def succeed(*arguments: object) -> str:
        status, out, err = carry_out("patch", *arguments)
        assert (status, err) == (0, "")
        return out

    return succeed


@pytest.fixture
def refused(complain):
    """The one line of a refusal, after which the tree is as it was."""

    def fail(action: str, root: Path) -> str:
        before = contents(root)
        line = complain("patch", action, root)
        assert contents(root) == before
        return line

    return fail


@pytest.fixture
def facts(patch):
    """:func:`patch`, as JSON."""

    def read(*arguments: object) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(patch(*arguments, "--json"))
        assert values["ok"] is True
        return values

    return read


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


@pytest.mark.parametrize("where", ["no git", "checkout", "worktree", "below", "ignored below"])
def test_patch_applies_and_reverts_byte_for_byte(where, tree, patch, monkeypatch):
    if where in ("checkout", "worktree"):
        git(tree, "init", "-q")
        git(tree, "add", "-A")
        git(tree, "commit", "-q", "-m", "one")
        git(tree, "config", "apply.whitespace", "error-all")
    if where == "worktree":
        git(tree, "worktree", "add", "-q", "../beside")
        tree = tree.parent / "beside"
    if "below" in where:
        # Inside somebody else's repository git leaves out what is not below the current directory.
        git(tree.parent, "init", "-q")
    if where == "ignored below":
        (tree.parent / ".gitignore").write_text("*\n")
    monkeypatch.setenv("GIT_DIR", str(tree.parent / "another"))
    before = contents(tree)
    assert "3 files of" in patch("check", tree)
    assert contents(tree) == before
    assert "3 files of" in patch("apply", tree)
    applied = contents(tree)
    assert {name: content.decode() for name, content in applied.items()} == {
        **AFTER,
        "main.py": "run()",
    }
    assert "nothing to do" in patch("apply", tree)
    assert "nothing to do" in patch("check", tree)
    assert contents(tree) == applied
    assert "3 files of" in patch("revert", tree)
    assert contents(tree) == before
    assert "nothing to do" in patch("revert", tree)
    assert contents(tree) == before


@pytest.mark.parametrize("done", [["pkg/one.py"], ["pkg/two.py", "three.py"]])
def test_patch_finishes_or_reverts_a_half_patched_tree(done, tree, patch, facts):
    before = contents(tree)
    for action, outcome in (("apply", "patched"), ("revert", "released")):
        for name in done:
            (tree / name).write_bytes(AFTER[name].encode())
        assert facts("status", tree)["state"] == "half-patched"
        assert "'deadpool patch apply' finishes it" in patch("status", tree)
        patch(action, tree)
        assert facts("status", tree)["state"] == outcome
        patch("revert", tree)
        assert contents(tree) == before


@pytest.mark.parametrize("action", ["apply", "check", "revert"])
def test_patch_leaves_changes_of_the_user(action, tree, refused):
    # One line longer, elsewhere: git apply alone would patch this.
    (tree / "three.py").write_text(BEFORE["three.py"] + "mine = 1\n")
    assert "three.py is changed" in refused(action, tree)
    (tree / "three.py").unlink()
    assert "three.py is missing" in refused(action, tree)


def test_patch_checks_unpatched_files_for_apply_only(tree, patch, refused):
    patch("apply", tree)
    (tree / "main.py").write_text("run(1)\n")
    for action in ("apply", "check"):
        assert "main.py is changed" in refused(action, tree)
    patch("revert", tree)


def test_the_set_is_chosen_by_the_tree(tree, sets, refused, facts):
    other = {name: text + "# 2\n" for name, text in BEFORE.items()}
    write_patch_set(sets / "v2", other)
    assert facts("status", tree)["tag"] == "v1"
    write_tree(tree, {name: other[name] for name in ("pkg/one.py", "pkg/two.py")})
    assert facts("status", tree)["tag"] == "v2"
    assert "three.py is changed" in refused("apply", tree)


def test_nothing_is_written_through_a_link_out_of_the_tree(tree, tmp_path, refused):
    (tree / "pkg").rename(tmp_path / "elsewhere")
    (tree / "pkg").symlink_to(tmp_path / "elsewhere")
    for action in ("apply", "check"):
        assert "is beyond a symbolic link" in refused(action, tree)
    assert (tmp_path / "elsewhere" / "one.py").read_text() == BEFORE["pkg/one.py"]
    (tree / "pkg").unlink()
    (tree / "pkg").symlink_to("pkg")
    assert "Too many levels of symbolic links" in refused("apply", tree)


def test_patch_refuses_without_git(tree, refused, facts, monkeypatch):
    monkeypatch.setenv("PATH", str(tree))
    assert "git was not found: install it" in refused("apply", tree)
    assert facts("status", tree)["state"] == "released"


@pytest.fixture(params=TAGS)
def tag(request):
    """Each supported one whose checkout is there: each has patches of its own."""
    name: str = request.param
    if checkout(name) is None:
        pytest.skip(f"no checkout of {name}")
    return name


@pytest.fixture
def megatron(tag, tmp_path):
    """The files that the table names, copied from the checkout."""
    source = checkout(tag)
    assert source is not None
    (patch_set,) = (each for each in command.find_patch_sets() if each.tag == tag)
    for name in patch_set.hashes:
        target = tmp_path / "Megatron-LM" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target)
    return tmp_path / "Megatron-LM"


@pytest.mark.megatron_lm
def test_patches_mark_every_point_and_nothing_else(tag, megatron, patch, facts):
    before = contents(megatron)
    assert facts("apply", megatron)["tag"] == tag
    added = {b"from deadpool_megatron.hookpoints import hookpoint\n", b"@hookpoint\n"}
    for name, content in contents(megatron).items():
        points = {
            p.function
            for p in points_of(tag.removeprefix("core_v"))
            if p.module.replace(".", "/") + ".py" == name
        }
        compile(content, name, "exec")
        assert marked_functions(content) == points
        lines = content.splitlines(keepends=True)
        assert b"".join(line for line in lines if line not in added) == before[name]
        assert sum(line in added for line in lines) == (len(points) + 1 if points else 0)
    patch("revert", megatron)
    assert contents(megatron) == before


def marked_functions(source: bytes) -> set[str]:
    """Functions of the module with the decorator, once its import has been seen."""
    marked = set()
    imported = False
    for node in ast.parse(source).body:
        imported |= ast.unparse(node) == "from deadpool_megatron.hookpoints import hookpoint"
        if isinstance(node, ast.FunctionDef) and imported:
            marked |= {node.name for d in node.decorator_list if ast.unparse(d) == "hookpoint"}
    return marked
