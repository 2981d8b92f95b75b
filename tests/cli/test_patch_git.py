"""``deadpool patch`` in git checkouts, and the real patches on the real source."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import patch_trees
import pytest
from patch_trees import AFTER, PATCHES, contents, facts, git, patch, refused, write_tree

from deadpool_megatron.cli import patching
from deadpool_megatron.hookpoints import POINTS
from tests.megatron_lm.checkout import TAG, checkout, needs_megatron_lm

sets, tree = patch_trees.sets, patch_trees.tree


@pytest.fixture
def repository(tree: Path, sets: Path) -> Path:
    """The tree as a git checkout, and the patch set for its first commit."""
    git(tree, "init", "-q", "-b", "main")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "one")
    git(tree, "tag", "v1")
    manifest = sets / "v1" / "manifest.json"
    head = git(tree, "rev-parse", "HEAD")
    manifest.write_text(manifest.read_text().replace("0" * 40, head))
    return tree


@pytest.mark.parametrize(
    "commands",
    [
        [],
        ["pack-refs --all"],
        ["checkout -q --detach"],
        ["checkout -q -b feature/x", "pack-refs --all"],
        ["checkout -q -b other", "commit -q --allow-empty -m two", "pack-refs --all"],
    ],
)
def test_head_is_read_as_git_reads_it(repository: Path, commands: list[str]) -> None:
    for command in commands:
        git(repository, *command.split())
    assert patching.head_commit(repository) == git(repository, "rev-parse", "HEAD")


def test_head_of_a_worktree_and_of_nothing(repository: Path, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    git(repository, "worktree", "add", "-q", "-b", "beside", str(beside))
    git(beside, "commit", "-q", "--allow-empty", "-m", "two")
    assert patching.head_commit(beside) == git(beside, "rev-parse", "HEAD")
    assert patching.head_commit(beside) != patching.head_commit(repository)
    # Copied without what it points at, as into a container.
    (beside / ".git").write_text("gitdir: ../gone\n")
    assert patching.head_commit(beside) is None
    assert patching.head_commit(tmp_path) is None
    git(tmp_path, "init", "-q", "unborn")
    assert patching.head_commit(tmp_path / "unborn") is None


def test_only_the_commit_of_the_tag_is_patched(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(repository)
    right = git(repository, "rev-parse", "HEAD")
    patch(capsys, "apply", repository)
    assert facts(capsys, "status", repository)["head"] == right
    patch(capsys, "revert", repository)
    assert git(repository, "status", "--porcelain") == ""

    git(repository, "commit", "-q", "--allow-empty", "-m", "two")
    wrong = git(repository, "rev-parse", "HEAD")
    for action in ("apply", "check"):
        line = refused(capsys, action, repository)
        assert f"is {wrong[:12]}, not v1 ({right[:12]}): git -C {repository} checkout v1" in line
    assert f"is {wrong[:12]}" in patch(capsys, "status", repository)
    # What is in can be taken out wherever HEAD has gone meanwhile.
    write_tree(repository, AFTER)
    patch(capsys, "revert", repository)
    assert contents(repository) == before
    (repository / "three.py").write_text("mine\n")
    assert f"git -C {repository} checkout {right[:12]} -- three.py" in refused(
        capsys, "revert", repository
    )


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """The files that the manifest names, copied from the checkout."""
    source = checkout()
    assert source is not None
    [patch_set] = patching.find_patch_sets()
    for name in [*(file.name for file in patch_set.patched), *patch_set.unpatched]:
        target = tmp_path / "Megatron-LM" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / name, target)
    return tmp_path / "Megatron-LM"


@needs_megatron_lm
@pytest.mark.megatron_lm
def test_real_files_in_and_out_again(megatron: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(megatron)
    assert facts(capsys, "check", megatron)["tag"] == TAG
    patch(capsys, "apply", megatron)
    assert "nothing to do" in patch(capsys, "apply", megatron)
    assert facts(capsys, "status", megatron)["state"] == "patched"
    after = contents(megatron)
    assert {name: mode for name, (_, mode) in after.items()} == {
        name: mode for name, (_, mode) in before.items()
    }
    patch(capsys, "revert", megatron)
    assert contents(megatron) == before


@needs_megatron_lm
@pytest.mark.megatron_lm
def test_patches_mark_every_point_and_nothing_else(
    megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(megatron)
    patch(capsys, "apply", megatron)
    added = {b"from deadpool_megatron.hookpoints import hookpoint\n", b"@hookpoint\n"}
    for name, (content, _) in contents(megatron).items():
        points = {p.function for p in POINTS if p.module.replace(".", "/") + ".py" == name}
        compile(content, name, "exec")
        assert marked_functions(content) == points
        lines = content.splitlines(keepends=True)
        assert b"".join(line for line in lines if line not in added) == before[name][0]
        assert sum(line in added for line in lines) == (len(points) + 1 if points else 0)


def marked_functions(source: bytes) -> set[str]:
    """Functions of the module with the decorator, once its import has been seen."""
    marked = set()
    imported = False
    for node in ast.parse(source).body:
        imported |= ast.unparse(node) == "from deadpool_megatron.hookpoints import hookpoint"
        if isinstance(node, ast.FunctionDef) and imported:
            marked |= {node.name for d in node.decorator_list if ast.unparse(d) == "hookpoint"}
    return marked


@needs_megatron_lm
@pytest.mark.megatron_lm
@pytest.mark.parametrize("initialised", [False, True])
def test_git_applies_the_same_patches(
    initialised: bool, megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(megatron)
    if initialised:
        git(megatron, "init", "-q")
    diffs_of_set = sorted(str(path) for path in (PATCHES / TAG).glob("*.patch"))
    git(megatron, "apply", *diffs_of_set)
    assert "nothing to do" in patch(capsys, "apply", megatron)
    git(megatron, "apply", "--reverse", *diffs_of_set)
    # Git keeps no more of a mode than whether a file is executable.
    after = {name: content for name, (content, _) in contents(megatron).items()}
    assert after == {name: content for name, (content, _) in before.items()}


@needs_megatron_lm
@pytest.mark.megatron_lm
def test_release_with_the_same_training_code_is_told_apart(
    megatron: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """core_v0.16.0 has the same four files; what is under them differs."""
    version = megatron / "megatron" / "core" / "package_info.py"
    version.write_text(version.read_text().replace("PATCH = 1\n", "PATCH = 0\n"))
    for action in ("apply", "check"):
        line = refused(capsys, action, megatron)
        assert f"package_info.py is not that of {TAG} (this is 0.16.0): use a checkout of" in line
