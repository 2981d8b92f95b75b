"""Which Megatron-LM is refused, and that functions are marked wherever they are named."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.hookpoints import hookpoint, is_marked, points_of
from deadpool_megatron.support import versions
from deadpool_megatron.support.versions import UntestedMegatron
from tests.megatron_lm.harness.checkout import TAG, TAGS, UNTAGGED, checkout, needs_megatron_lm
from tests.megatron_lm.harness.parsing import in_checkout

VERSION = "0.16.1"
TRAIN = "megatron.training.training"


def function(name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(f"def {name}({', '.join(parameters)}): return {name!r}", namespace)
    made: Callable[..., Any] = namespace[name]
    return made


@pytest.fixture
def modules() -> dict[str, Any]:
    """A Megatron-LM in which all points are as they have to be."""
    made: dict[str, Any] = {
        "megatron.core.package_info": SimpleNamespace(__version__=VERSION),
        "megatron.training": ModuleType("megatron.training"),
    }
    for point in points_of(VERSION):
        module = made.setdefault(point.module, ModuleType(point.module))
        setattr(module, point.function, function(point.function, point.parameters))
    return made


def examine(modules: dict[str, Any]) -> versions.Report:
    def importer(name: str) -> Any:
        if name not in modules:
            raise ModuleNotFoundError(name)
        return modules[name]

    return versions.examine(importer)


def refused(report: versions.Report, allow: bool = False) -> str:
    with pytest.raises(UntestedMegatron) as error:
        versions.check(report, allow)
    return str(error.value)


@pytest.mark.parametrize("behind", ["", "+59dd09c37"], ids=["release", "git checkout"])
def test_a_tested_one(modules: dict[str, Any], behind: str) -> None:
    modules["megatron.core.package_info"].__version__ = VERSION + behind
    report = examine(modules)
    assert report.version == VERSION
    assert [found.point for found in report.points] == list(points_of(VERSION))
    assert not any(found.trouble or found.marked for found in report.points)
    versions.check(report, allow_untested=False)


#: by tag: what its package_info.py says, and what the package index calls its newest releases
RELEASES = {
    "core_v0.16.1": ("0.16.1", ("0.16.0", "0.16.1")),
    "core_v0.17.1": ("0.17.1", ("0.17.1",)),
    "core_v0.18.2": ("0.18.2", ("0.18.2",)),
    "core_v0.19.0": ("0.19.1", ("0.19.0", "0.19.2")),
}


@pytest.mark.parametrize("tag", TAGS)
def test_a_release_is_tried_whatever_it_calls_itself(tag: str) -> None:
    """A core of the package index over the tree of a tag is not refused for its name alone."""
    itself, released = RELEASES[tag]
    assert {itself, *released} <= set(versions.TESTED)
    tree = checkout(tag)
    if tree is not None:
        info = runpy.run_path(str(tree / "megatron" / "core" / "package_info.py"))
        assert versions.released(info["__version__"]) in (itself, *released)


def test_a_commit_is_tried_with_its_own_sources(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Main keeps its number while it moves."""
    training = tmp_path / "megatron" / "training" / "training.py"
    training.parent.mkdir(parents=True)
    training.write_text("")
    modules["megatron.training"].__file__ = str(training.parent / "__init__.py")
    modules["megatron.core.package_info"].__version__ = "0.16.9+d98e8a64d"
    monkeypatch.setattr(versions, "lacking", lambda _tree, _version: ())
    assert "its version is 0.16.9" in refused(examine(modules))
    row = {"commit": "d98e8a64ddf3", "sources": versions.hash_of_sources(tmp_path)}
    monkeypatch.setitem(versions.COMMITS, "0.16.9", row)
    versions.check(examine(modules), allow_untested=False)
    training.write_text("# of a later commit")
    assert refused(examine(modules)).endswith("tries nevertheless")
    versions.check(examine(modules), allow_untested=True)


def test_the_commit_that_was_tried_is_the_one_of_the_tests() -> None:
    ((version, row),) = versions.COMMITS.items()
    assert f"main-{row['commit']}" == UNTAGGED
    tree = checkout(UNTAGGED)
    if tree is not None:
        assert versions.version_beside(tree) == version
        assert versions.hash_of_sources(tree) == row["sources"]


def test_an_untried_version_is_told_what_it_lacks_in_one_line(
    modules: dict[str, Any], tmp_path: Path
) -> None:
    """Before anything runs, and whatever is allowed: it would end in the first recovery."""
    training = tmp_path / "megatron" / "training"
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    training.mkdir()
    (training / "training.py").write_text("def train_step(model):\n    pass\n")
    modules["megatron.training"].__file__ = str(training / "__init__.py")
    versions.check(examine(modules), allow_untested=False)
    modules["megatron.core.package_info"].__version__ = "0.99.0"
    for allow in (False, True):
        text = refused(examine(modules), allow)
        assert "\n" not in text
        assert "has not been tried with Megatron-LM 0.99.0, which lacks" in text
        assert "; iteration of train_step() in megatron/training/training.py;" in text
        assert "; Timer._started in megatron/core/timers.py;" in text


def test_functions_that_are_gone(modules: dict[str, Any]) -> None:
    del modules[TRAIN].training_log
    del modules["megatron.training.checkpointing"]
    report = examine(modules)
    assert {found.point.function for found in report.missing} == {
        "training_log",
        "save_checkpoint",
        "load_checkpoint",
    }
    for allow in (False, True):
        text = refused(report, allow)
        assert f"{TRAIN}.training_log is missing" in text
        assert "allow-untested" not in text


def test_marks_are_seen_and_do_not_hide_parameters(modules: dict[str, Any]) -> None:
    modules[TRAIN].train = hookpoint(modules[TRAIN].train)
    (found,) = (f for f in examine(modules).points if f.point.function == "train")
    assert found.marked
    assert not found.lacks


def test_two_megatrons(modules: dict[str, Any], tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    modules["megatron.training"].__file__ = str(tmp_path / "megatron" / "training" / "__init__.py")
    assert examine(modules).beside == ""
    (core / "package_info.py").write_text("__version__ = '0.' + '16.1'\n")
    versions.check(examine(modules), allow_untested=False)
    (core / "package_info.py").write_text("__version__ = '0.17.0'\n")
    for allow in (False, True):
        text = refused(examine(modules), allow)
        assert "megatron.core is 0.16.1, megatron.training belongs to 0.17.0" in text
        assert "PYTHONPATH" in text


@pytest.fixture
def loaded(modules: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The same as loaded modules, with copies of the functions under other names."""
    modules["megatron.training"].pretrain = modules[TRAIN].pretrain
    modules[TRAIN].write_checkpoint = modules["megatron.training.checkpointing"].save_checkpoint
    for name in ("pretrain_gpt", "somebody_else"):
        modules[name] = ModuleType(name)
        modules[name].pretrain = modules[TRAIN].pretrain
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def test_points_are_installed_wherever_they_are_named(loaded: dict[str, Any]) -> None:
    names = versions.install_points()
    assert names == tuple(f"{point.module}.{point.function}" for point in points_of(VERSION))
    assert all(found.marked for found in examine(loaded).points)
    pretrain = loaded[TRAIN].pretrain
    assert loaded["megatron.training"].pretrain is pretrain
    assert loaded["pretrain_gpt"].pretrain is pretrain
    saved = loaded["megatron.training.checkpointing"].save_checkpoint
    assert loaded[TRAIN].write_checkpoint is saved
    assert not is_marked(loaded["somebody_else"].pretrain)
    assert pretrain() == "pretrain"
    assert versions.install_points() == ()
    assert loaded[TRAIN].pretrain is pretrain


@pytest.mark.full
@pytest.mark.megatron_lm
@needs_megatron_lm
def test_the_real_one() -> None:
    (line,) = in_checkout("points")
    facts = json.loads(line)
    assert facts["version"] == facts["beside"]
    assert facts["version"] in versions.TESTED
    assert facts["troubles"] == []
    patched = all(facts["marked before"])
    assert len(facts["installed"]) == (0 if patched else len(points_of(TAG.removeprefix("core_v"))))
    assert facts["again"] == []
    assert all(facts["marked"])
    assert facts["all"]
