"""``deadpool patch``: in and out byte for byte, only where it belongs, never by halves."""

from __future__ import annotations

import difflib
import errno
import json
import os
import sys
import tomllib
from pathlib import Path

import patch_trees
import pytest
from hypothesis import given
from hypothesis import strategies as st
from patch_trees import (
    AFTER,
    BEFORE,
    MODES,
    PATCHES,
    REPOSITORY,
    contents,
    facts,
    patch,
    refused,
    write_patch_set,
    write_tree,
)

import deadpool_megatron
from deadpool_megatron import cli
from deadpool_megatron.cli import diffs, patching

sets, tree = patch_trees.sets, patch_trees.tree


def test_in_and_out_again(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(tree)
    assert "3 files of" in patch(capsys, "check", tree)
    assert contents(tree) == before
    assert "3 files of" in patch(capsys, "apply", tree)
    applied = contents(tree)
    assert {name: content.decode() for name, (content, _) in applied.items()} == {
        **AFTER,
        "main.py": "run()\n",
    }
    assert {name: applied[name][1] for name in MODES} == MODES
    assert "nothing to do" in patch(capsys, "apply", tree)
    assert "patched already" in patch(capsys, "check", tree)
    assert contents(tree) == applied
    assert "3 files of" in patch(capsys, "revert", tree)
    assert contents(tree) == before
    assert "nothing to do" in patch(capsys, "revert", tree)
    assert contents(tree) == before


def test_status_shows_every_file(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "three.py").write_text(AFTER["three.py"])
    (tree / "pkg" / "two.py").unlink()
    (tree / "main.py").write_text("run(1)\n")
    said = patch(capsys, "status", tree)
    words = [line.split() for line in said.splitlines()]
    assert said.startswith(f"{tree}: unknown (held against v1; no git")
    for row in (
        ["pkg/one.py", "released"],
        ["pkg/two.py", "missing"],
        ["three.py", "patched"],
        ["main.py", "changed"],
    ):
        assert row in words
    assert "apply would be refused: pkg/two.py is missing" in said


def test_json_of_every_action(tree: Path, sets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = [*BEFORE, "main.py"]
    assert facts(capsys, "check", tree) == {
        "ok": True,
        "action": "check",
        "tree": str(tree),
        "state": "released",
        "tag": "v1",
        "commit": "0" * 40,
        "head": None,
        "patches": str(sets / "v1"),
        "files": dict.fromkeys(names, "released"),
        "apply_refused": None,
    }
    applied = facts(capsys, "apply", tree)
    assert (applied["action"], applied["state"]) == ("apply", "patched")
    assert facts(capsys, "status", tree)["files"]["pkg/one.py"] == "patched"
    assert facts(capsys, "revert", tree)["state"] == "released"
    (tree / "three.py").write_text("mine\n")
    status = facts(capsys, "status", tree)
    assert status["state"] == "unknown"
    assert "three.py" in status["apply_refused"]
    assert cli.main(["patch", "check", str(tree), "--json"]) == 2
    captured = capsys.readouterr()
    refusal = json.loads(captured.out)
    assert refusal == {"ok": False, "action": "check", "error": status["apply_refused"]}
    assert captured.err == f"deadpool patch: {refusal['error']}\n"


@pytest.mark.parametrize("done", [["pkg/one.py"], ["pkg/two.py", "three.py"]])
def test_half_patched_is_finished_or_undone(
    done: list[str], tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tree)
    for action in ("apply", "revert"):
        for name in done:
            (tree / name).write_bytes(AFTER[name].encode())
        assert facts(capsys, "status", tree)["state"] == "half-patched"
        assert "'deadpool patch apply' finishes it" in patch(capsys, "status", tree)
        patch(capsys, action, tree)
        assert facts(capsys, "status", tree)["state"] == (
            "patched" if action == "apply" else "released"
        )
        patch(capsys, "revert", tree)
        assert contents(tree) == before


@pytest.mark.parametrize("action", ["apply", "check", "revert"])
def test_changes_of_the_user_are_left_alone(
    action: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "pkg" / "two.py").write_text("mine\n")
    (tree / "three.py").write_text("mine too\n")
    line = refused(capsys, action, tree)
    assert "pkg/two.py has other changes than the patch: save them, then put it back" in line
    (tree / "pkg" / "two.py").unlink()
    assert "pkg/two.py is missing" in refused(capsys, action, tree)


def test_files_that_are_not_patched_matter_to_apply_only(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tree)
    patch(capsys, "apply", tree)
    (tree / "main.py").write_text("run(1)\n")
    assert "main.py is not that of v1" in refused(capsys, "apply", tree)
    assert "main.py is not that of v1" in refused(capsys, "check", tree)
    patch(capsys, "revert", tree)
    (tree / "main.py").write_text("run()\n")
    assert contents(tree) == before


def test_the_set_is_chosen_by_the_tree(
    tree: Path, sets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {name: text + "# 2\n" for name, text in BEFORE.items()}
    write_patch_set(sets / "v2", "v2", before=other)
    assert facts(capsys, "status", tree)["tag"] == "v1"
    write_tree(tree, {name: other[name] for name in ("pkg/one.py", "pkg/two.py")})
    assert facts(capsys, "status", tree)["tag"] == "v2"
    assert "three.py has other changes" in refused(capsys, "apply", tree)


@pytest.mark.usefixtures("sets")
def test_no_tree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for action in ("apply", "check", "revert", "status"):
        assert "does not exist" in refused(capsys, action, tmp_path / "absent")
        assert "is not a directory" in refused(capsys, action, tmp_path / "file")
        assert "not a checkout of Megatron-LM" in refused(capsys, action, tmp_path / "empty")


def test_links_are_followed_inside_the_tree_only(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(tree)
    (tree / "three.py").rename(tree / "real.py")
    (tree / "three.py").symlink_to("real.py")
    (tmp_path / "link").symlink_to(tree)
    patch(capsys, "apply", tmp_path / "link")
    assert (tree / "three.py").is_symlink()
    assert (tree / "real.py").read_text() == AFTER["three.py"]
    patch(capsys, "revert", tree)
    (tree / "three.py").unlink()
    (tree / "real.py").rename(tree / "three.py")
    assert contents(tree) == before

    (tree / "pkg").rename(tmp_path / "elsewhere")
    (tree / "pkg").symlink_to(tmp_path / "elsewhere")
    for action in ("apply", "check", "revert", "status"):
        line = refused(capsys, action, tree)
        assert "pkg/one.py is a link that leads out of" in line
    assert (tmp_path / "elsewhere" / "one.py").read_text() == BEFORE["pkg/one.py"]
    (tree / "pkg").unlink()
    (tree / "pkg").symlink_to("pkg")
    assert "Too many levels of symbolic links" in refused(capsys, "apply", tree)


def test_full_disk_changes_nothing(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        line = refused(capsys, "apply", tree)
    assert "three.py: No space left on device; nothing was changed" in line
    patch(capsys, "apply", tree)


def test_cut_short_between_two_files(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(tree)
    replace = Path.replace

    def fails(self: Path, target: Path) -> Path:
        if Path(target).name == "two.py":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(self))
        return replace(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fails)
        assert cli.main(["patch", "apply", str(tree)]) == 2
    line = capsys.readouterr().err
    assert "two.py: Operation not permitted; 'deadpool patch status' shows" in line
    assert facts(capsys, "status", tree)["state"] == "half-patched"
    assert contents(tree).keys() == before.keys()
    patch(capsys, "revert", tree)
    assert contents(tree) == before


def test_what_a_killed_run_left_is_removed(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(tree)
    with monkeypatch.context() as killed:
        # As after SIGKILL: the files beside their targets are complete, and nobody removes them.
        killed.setattr(Path, "replace", lambda _self, _target: None)
        killed.setattr(Path, "unlink", lambda _self, missing_ok=False: None)
        patch(capsys, "apply", tree)
    assert len(contents(tree)) == len(before) + 3
    assert "nothing to do" in patch(capsys, "revert", tree)
    assert contents(tree) == before


def test_missing_permission(
    tree: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write everywhere, so modes cannot make this happen in every place tests run.
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, _mode: Path(path).name != "pkg")
        for action in ("apply", "check"):
            assert f"{tree / 'pkg'} is not writable" in refused(capsys, action, tree)
    patch(capsys, "apply", tree)
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, _mode: Path(path).name != "pkg")
        assert "is not writable" in refused(capsys, "revert", tree)
        assert "nothing to do" in patch(capsys, "apply", tree)
    (tree / "main.py").unlink()
    (tree / "main.py").mkdir()
    assert "main.py: Is a directory" in refused(capsys, "apply", tree)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("manifest.json", "{", "manifest.json is damaged"),
        ("manifest.json", '{"tag": "v1", "patched": []}', "manifest.json is damaged"),
        ("1.patch", "@@ -1,2 +1,3 @@\n x\n", "line 3 is not a line of a hunk"),
        ("1.patch", "@@ -1,1 +1,1 @@\n-x\n+y\n", "the hunk for line 1 does not fit"),
        ("1.patch", "", "no hunk"),
        ("1.patch", None, "No such file"),
    ],
)
def test_damaged_patch_sets_are_named(
    name: str,
    damage: str | None,
    said: str,
    tree: Path,
    sets: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if damage is None:
        (sets / "v1" / name).unlink()
    else:
        (sets / "v1" / name).write_text(damage)
    line = refused(capsys, "apply", tree)
    assert said in line
    assert str(sets / "v1" / name) in line


def test_a_diff_that_gives_another_file_is_refused(
    tree: Path, sets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    diff = sets / "v1" / "2.patch"
    diff.write_text(diff.read_text().replace("@mark", "@mork"))
    assert "is not the one of the manifest" in refused(capsys, "apply", tree)


def test_patch_sets_of_an_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "deadpool_megatron" / "__init__.py"
    monkeypatch.setattr(deadpool_megatron, "__file__", str(package))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "prefix"))
    # Somebody else's package of that name.
    (tmp_path / "site-packages" / "patches" / "core").mkdir(parents=True)
    found = write_patch_set(tmp_path / "prefix/share/deadpool_megatron/patches/v1")
    assert [patch_set.directory for patch_set in patching.find_patch_sets()] == [found]


def test_every_patch_set_is_installed() -> None:
    with open(REPOSITORY / "pyproject.toml", "rb") as file:
        declared = tomllib.load(file)["tool"]["setuptools"]["data-files"]
    assert declared == {
        f"share/deadpool_megatron/patches/{directory.name}": [f"patches/{directory.name}/*"]
        for directory in PATCHES.iterdir()
    }


@given(
    st.lists(st.sampled_from("abc\r "), min_size=1).map(lambda x: [f"{c}\n".encode() for c in x]),
    st.lists(st.sampled_from("abc\r "), min_size=1).map(lambda x: [f"{c}\n".encode() for c in x]),
    st.integers(1, 3),
)
def test_diffs_lead_there_and_back(old: list[bytes], new: list[bytes], context: int) -> None:
    diff = b"".join(difflib.diff_bytes(difflib.unified_diff, old, new, b"a", b"b", n=context))
    if old == new:
        return
    hunks = diffs.parse(diff)
    assert diffs.apply(hunks, b"".join(old)) == b"".join(new)
    assert diffs.apply(hunks, b"".join(new), reverse=True) == b"".join(old)
    with pytest.raises(diffs.DiffError):
        diffs.apply(hunks, b"z\n" * (len(old) + 1))
