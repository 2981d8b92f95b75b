"""What holds for the repository as a whole: versions agree, scripts work, commands start fast."""

import ast
import math
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import deadpool_megatron
from deadpool_megatron.preflight.host import GPU_VARIABLE
from tests.common import gpus

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "deadpool_megatron"
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]

RELATIVE_WORDS = {"What", "Whether", "Whom", "Whose", "Which", "Who", "How", "Where", "Why", "When"}


@pytest.fixture(scope="module")
def project():
    with open(ROOT / "pyproject.toml", "rb") as file:
        values: dict[str, Any] = tomllib.load(file)["project"]
    return values


@pytest.fixture(scope="module")
def locked():
    text = (ROOT / "scripts" / "lock.txt").read_text()
    found = re.findall(r"^([a-z]\S*)==(\S+)( ; .*)? \\\n +--hash=sha256:", text, re.MULTILINE)
    assert len(found) == len(re.findall(r"^[a-z]", text, re.MULTILINE))  # each with a hash
    return {canonicalize_name(name): version for name, version, _ in found}


# Extras that the environment of the tests cannot have: they need a GPU to be built or run.
GPU_EXTRAS = {"transformer-engine"}


def requirements_of(project: dict[str, Any]) -> list[Requirement]:
    extras = project["optional-dependencies"]
    optional = [line for name in extras.keys() - GPU_EXTRAS for line in extras[name]]
    found = [Requirement(line) for line in [*project["dependencies"], *optional]]
    return [requirement for requirement in found if requirement.name != project["name"]]


def test_tests_see_no_gpu_unless_they_ask_for_it(monkeypatch):
    assert os.environ[GPU_VARIABLE] == ""
    monkeypatch.setenv(GPU_VARIABLE, "2,3")
    monkeypatch.delenv("DEADPOOL_TEST_GPUS")
    gpus.hide()
    assert os.environ[GPU_VARIABLE] == ""
    gpus.hide()
    gpus.show()
    assert os.environ[GPU_VARIABLE] == "2,3"


def test_the_version_is_the_same_everywhere(project):
    heading = r"^## (\S+) - (\S+)$"
    newest = re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    cited = f"version: {newest[1]}\ndate-released: {newest[2]}\n"
    assert cited in (ROOT / "CITATION.cff").read_text()
    assert project["dynamic"] == ["version", "readme"]  # it is read from the package
    assert deadpool_megatron.__version__ == newest[1]
    command = ["git", "tag", "--points-at", "HEAD"]
    tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert all(tag == f"v{newest[1]}" for tag in tags)


def test_no_text_installs_a_name_that_the_project_does_not_own(project):
    assert "urls" not in project, "now it may be ours: remove this test"
    texts = [*PACKAGE.rglob("*.py"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    found = [path for path in texts if re.search(r"install\s+\W?deadpool", path.read_text())]
    assert not found


def test_each_python_that_was_run_is_a_classifier(project):
    table = (ROOT / "docs" / "compatibility.md").read_text()
    row = re.search(r"^\| Python \|(.*?)\|", table, re.MULTILINE)
    assert row is not None
    known = {each.rpartition(" ")[2] for each in project["classifiers"] if " :: 3." in each}
    assert set(re.findall(r"3\.\d+", row[1])) == known


def test_the_lock_fits_the_ranges(project, locked):
    for requirement in requirements_of(project):
        pinned = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pinned), requirement


def test_the_lock_has_everything_that_is_needed(project, locked):
    waiting, seen = requirements_of(project), set[str]()
    while waiting:
        name = canonicalize_name(waiting.pop().name)
        if name in seen:
            continue
        seen.add(name)
        for line in metadata.distribution(name).requires or ():
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed)
    assert seen <= locked.keys()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_run_from_anywhere(script):
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    subprocess.run(["bash", "-n", script], check=True)


def test_no_link_of_the_documentation_is_broken(tmp_path):
    """The site's own builder says it of docs/; for the rest the files are looked up."""
    command = [sys.executable, "-m", "mkdocs", "build", "-f", ".ci/mkdocs.yml", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md")]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
            file = page.parent / target if target else page
            assert file.exists(), f"{page.name}: {target}"
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in map(anchor_of, headings), f"{page.name}: {anchor}"


def anchor_of(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_the_command_line_does_not_load_torch():
    """``deadpool status`` and friends answer at once, also on a host without torch's memory."""
    program = (
        "import sys, deadpool_megatron.cli\n"
        "print(sorted({'torch', 'megatron', 'matplotlib', 'rich'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def ceilings(pyproject: str | None = None) -> dict[str, float]:
    text = (ROOT / "pyproject.toml").read_text() if pyproject is None else pyproject
    found: dict[str, float] = tomllib.loads(text)["tool"].get("deadpool", {}).get("ceilings", {})
    return found


def test_the_whole_stays_under_its_ceilings():
    command = [sys.executable, ROOT / "scripts" / "code_lines.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ceilings_only_fall():
    def git(*command: str) -> str:
        done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else ""

    tag = git("describe", "--tags", "--abbrev=0").strip()
    if not tag:
        pytest.skip("no tag can be reached: a tree without its history")
    before, now = ceilings(git("show", f"{tag}:pyproject.toml")), ceilings()
    if not before:
        pytest.skip(f"{tag} has no ceilings")
    risen = {name for name, most in before.items() if now.get(name, math.inf) > most}
    assert not risen, f"above those of {tag}: {risen}"


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_short_documented_and_careful(path):
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= ceilings()["module"]
    if tree.body:
        assert ast.get_docstring(tree), "a module says what its one job is"
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "-").split()[0].strip(",.:")
            where = (
                f"{getattr(node, 'name', 'the module')}: a docstring begins with a verb or a noun"
            )
            assert first not in RELATIVE_WORDS, where
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: bare except"
        if isinstance(node, ast.Attribute) and node.attr == "select":
            limited = isinstance(node.value, ast.Name) and node.value.id == "select"
            assert not limited, f"line {node.lineno}: refuses descriptors above 1023"
        if isinstance(node, ast.Attribute) and node.attr in ("load", "loads", "Unpickler"):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            assert owner not in ("pickle", "cloudpickle", "dill"), f"line {node.lineno}: unpickling"


#: the most places at which tests, and statements of transcripts, use private attributes
PRIVATE_ACCESSES = {".py": 146, ".txt": 725}


def private_accesses(text: str) -> int:
    return sum(
        isinstance(node, ast.Attribute)
        and re.match(r"_(?!_)", node.attr) is not None
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in ast.walk(ast.parse(text))
    )


def test_private_accesses_only_become_fewer():
    counts = dict.fromkeys(PRIVATE_ACCESSES, 0)
    for path in (ROOT / "tests").rglob("*.py"):
        text = path.read_text()
        counts[".py"] += private_accesses(text)
        assert path == Path(__file__) or "object.__new__" not in text, path
    for path in (ROOT / "tests").rglob("calls/*.txt"):
        for line in path.read_text().splitlines():
            counts[".txt"] += private_accesses(line) if line[:1] not in ("", " ", "=") else 0
            assert "object.__new__" not in line, path
    over = {kind: number for kind, number in counts.items() if number > PRIVATE_ACCESSES[kind]}
    assert not over, "construct it with the parts that are needed, or assert on what it shows"
