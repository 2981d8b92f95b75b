"""The version of Megatron-LM, and whether it has the functions that the hooks take part in.

A version that was never tried is held against the names in it that the hooks rely on
(``tables/names.toml``), at the start of a run. Nothing of Megatron is imported for that: the source
is read, so that what methods set on ``self`` is seen as well.

:func:`install_points` wraps those functions at run time, for a tree that ``deadpool patch`` has not
changed. Copies that ``from ... import`` has made of them are replaced as well.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import itertools
import operator
import os
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from deadpool_megatron import hookpoints

_TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "tables" / "versions.toml").read_text()
)
#: what package_info.py says of those that were tried
TESTED: tuple[str, ...] = tuple(_TABLES["tested"])
#: by what package_info.py says of it: a commit without a tag that was tried, and its sources
COMMITS: dict[str, dict[str, str]] = _TABLES["commits"]
_TRIED = ", ".join([*TESTED, *(f"{key} at {row['commit']}" for key, row in COMMITS.items())])
#: by MAJOR.MINOR, the newest last: where its versions differ from others
FAMILIES: dict[str, dict[str, Any]] = dict(
    zip(
        _TABLES["families"],
        itertools.accumulate(_TABLES["families"].values(), operator.or_),
        strict=True,
    )
)
_PACKAGE_INFO = "megatron.core.package_info"
#: as MAJOR.MINOR, the newest last
VERSIONS = tuple(FAMILIES)
Importer = Callable[[str], Any]


class UntestedMegatron(RuntimeError):
    """This Megatron-LM was never tried, or cannot work; one line says what was found."""


@dataclass(frozen=True)
class FoundPoint:
    """One point as it was found. ``lacks``: parameters that the handler relies on."""

    point: hookpoints.Point
    missing: bool = False
    lacks: tuple[str, ...] = ()
    marked: bool = False

    @property
    def trouble(self) -> str:
        """One line; empty when everything is there."""
        name = f"{self.point.module}.{self.point.function}"
        if self.missing:
            return f"{name} is missing"
        if self.lacks:
            return f"{name} lacks the parameter {', '.join(self.lacks)}"
        return ""


@dataclass(frozen=True)
class Report:
    """Findings of :func:`examine`. ``version`` is that of the megatron.core in use, ``beside`` that
    of the one which lies beside megatron.training (empty: none does). ``tried``: it is one that was
    tried; ``lacking``: names of ``tables/names.toml`` that another one does not have.
    """

    version: str
    beside: str
    points: tuple[FoundPoint, ...]
    tried: bool
    lacking: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[FoundPoint, ...]:
        """Points that do not exist."""
        return tuple(found for found in self.points if found.missing)


def examine(importer: Importer = importlib.import_module) -> Report:
    """Look at the Megatron-LM that can be imported. ``importer``: how."""
    version, tree = released(importer(_PACKAGE_INFO).__version__), _tree(importer)
    tried = version in TESTED or _is_a_tried_commit(version, tree)
    return Report(
        version=version,
        beside=version_beside(tree),
        points=tuple(_look_at(point, importer) for point in hookpoints.points_of(version)),
        tried=tried,
        # Of those that were tried the tests know; reading the source takes a second.
        lacking=() if tried or tree is None else lacking(tree, version),
    )


def _is_a_tried_commit(version: str, tree: Path | None) -> bool:
    """By its sources: main keeps its number while it moves, and an archive names no commit."""
    return (
        tree is not None
        and version in COMMITS
        and (COMMITS[version]["sources"] == hash_of_sources(tree))
    )


def hash_of_sources(tree: Path) -> str:
    """Return a hash of all Python files of Megatron in ``tree``, and of their names."""
    digest = hashlib.sha256()
    for path in sorted((tree / "megatron").rglob("*.py")):
        digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def released(version: str) -> str:
    """Returns a version without the commit that Megatron adds to it in a git checkout."""
    return version.partition("+")[0]


def _tree(importer: Importer) -> Path | None:
    """The folder that holds the package ``megatron`` to which megatron.training belongs."""
    try:
        place = getattr(importer("megatron.training"), "__file__", None)
    except ImportError:
        return None
    return None if place is None else Path(place).parents[2]


def tree_of(script: Path) -> Path:
    """Return the checkout that a script trains with: its own folder, one of PYTHONPATH, or one that
    the script lies below; its own folder where none is a checkout."""
    own = script.resolve().parent
    named = (Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)
    for place in (own, *named, *own.parents):
        if (place / "megatron" / "training").is_dir():
            return place.resolve()
    return own


def version_beside(tree: Path | None) -> str:
    """megatron is a namespace package: its core may come from a wheel, its training from a tree."""
    if tree is None:
        return ""
    info = tree / "megatron" / "core" / "package_info.py"
    return released(runpy.run_path(str(info))["__version__"]) if info.is_file() else ""


def _look_at(point: hookpoints.Point, importer: Importer) -> FoundPoint:
    try:
        function = getattr(importer(point.module), point.function, None)
    except ImportError:
        function = None
    if function is None:
        return FoundPoint(point, missing=True)
    # Also of a wrapped function these are the parameters of the original.
    parameters = inspect.signature(function).parameters
    lacks = tuple(name for name in point.parameters if name not in parameters)
    return FoundPoint(point, lacks=lacks, marked=hookpoints.is_marked(function))


def check(report: Report, allow_untested: bool) -> None:
    """Raise UntestedMegatron unless protection has been tried with this one, or may try.

    ``allow_untested`` helps against another version that has all that is relied upon, not against
    names that are not there or two Megatrons in one process.
    """
    if report.beside and report.beside != report.version:
        raise UntestedMegatron(
            f"two Megatrons: megatron.core is {report.version}, megatron.training belongs to"
            f" {report.beside}; put the folder of your training script first in PYTHONPATH"
        )
    if report.lacking:
        raise UntestedMegatron(
            f"protection has not been tried with Megatron-LM {report.version}, which lacks"
            f" {'; '.join(report.lacking)}; tried were {_TRIED}"
        )
    if allow_untested and not report.missing:
        return
    troubles = [found.trouble for found in report.points if found.trouble]
    if not report.tried:
        troubles.insert(0, f"its version is {report.version}; tried were {_TRIED}")
    if not troubles:
        return
    advice = (
        "without these functions there is no protection"
        if report.missing
        else f"{hookpoints.ALLOW_UNTESTED} tries nevertheless"
    )
    raise UntestedMegatron(
        f"protection has not been tried with this Megatron-LM: {'; '.join(troubles)}; {advice}"
    )


def install_points() -> tuple[str, ...]:
    """Mark every point, in its module and wherever else a loaded module of Megatron or the training
    script names it; returns which. Nothing happens in a tree that is patched, or a second time.

    Raises UntestedMegatron for a tree of which only a part is patched.
    """
    originals = {
        point: getattr(importlib.import_module(point.module), point.function)
        for point in hookpoints.points_of(
            released(importlib.import_module(_PACKAGE_INFO).__version__)
        )
    }
    waiting = {point: one for point, one in originals.items() if not hookpoints.is_marked(one)}
    if waiting and len(waiting) < len(originals):
        left = ", ".join(sorted({point.module for point in waiting}))
        raise UntestedMegatron(
            "this Megatron-LM is patched in part: run 'deadpool patch apply' or 'deadpool patch"
            f" revert' on it (not patched are {left})"
        )
    for original in waiting.values():
        marked = hookpoints.hookpoint(original)
        for names_of in _namespaces():
            for name in [name for name, value in names_of.items() if value is original]:
                names_of[name] = marked
    return tuple(f"{point.module}.{point.function}" for point in waiting)


def _namespaces() -> Iterator[dict[str, Any]]:
    """Of the loaded modules that may hold a copy of one of Megatron's functions."""
    modules: Mapping[str, ModuleType | None] = dict(sys.modules)
    for name, module in modules.items():
        ours = name == "__main__" or name.startswith(("megatron.", "pretrain_"))
        if ours and module is not None:
            yield vars(module)


@dataclass(frozen=True)
class Name:
    """A function, a class, its method or attribute, or a variable of a file of Megatron-LM.

    ``parameters``: those of a function that are used by name or position. ``versions``: those in
    which this is as it was read.
    """

    file: str
    name: str
    parameters: tuple[str, ...] = ()
    versions: tuple[str, ...] = VERSIONS


def _names() -> Iterator[Name]:
    for point in hookpoints.POINTS:
        versions = tuple(version for version in VERSIONS if point in hookpoints.points_of(version))
        yield Name(
            point.module.replace(".", "/") + ".py", point.function, point.parameters, versions
        )
    table = (Path(__file__).parent / "tables" / "names.toml").read_text()
    for row in tomllib.loads(table)["names"]:
        versions = tuple(row.get("versions", " ".join(VERSIONS)).split())
        for text in row["names"].split():
            name, _, parameters = text.rstrip(")").partition("(")
            yield Name(row["file"], name, tuple(filter(None, parameters.split(","))), versions)


NAMES: tuple[Name, ...] = tuple(_names())


def expected_in(version: str) -> tuple[Name, ...]:
    """Return what a version has to have; one that nobody tried, what the newest has."""
    family = next((each for each in VERSIONS if version.startswith(f"{each}.")), VERSIONS[-1])
    return tuple(name for name in NAMES if family in name.versions)


def lacking(tree: Path, version: str) -> tuple[str, ...]:
    """Return what the source in ``tree`` lacks, in words."""
    sources: dict[str, ast.Module] = {}
    return tuple(filter(None, (_complaint(tree, name, sources) for name in expected_in(version))))


def _complaint(tree: Path, name: Name, sources: dict[str, ast.Module]) -> str:
    file = tree / name.file
    if name.file not in sources:
        sources[name.file] = ast.parse(file.read_text() if file.is_file() else "")
    found = find(sources[name.file], name.name)
    if found is None:
        return f"{name.name} in {name.file}"
    if not name.parameters:
        return ""
    has = _parameters(found)
    missing = [parameter for parameter in name.parameters if parameter not in has]
    return f"{', '.join(missing)} of {name.name}() in {name.file}" if missing else ""


def find(scope: ast.AST, name: str) -> ast.AST | None:
    """Return what defines ``name``, parts of which are joined by dots."""
    for part in name.split("."):
        found = dict(_definitions(scope)).get(part)
        if found is None:
            return None
        scope = found
    return scope


def _definitions(scope: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Everything a module or class defines, also under an ``if`` or ``try``; of a class also what
    its methods set on ``self``.
    """
    for node in _statements(scope):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
            if isinstance(scope, ast.ClassDef):
                yield from _attributes(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                yield (alias.asname or alias.name), node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node


def _statements(scope: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(scope):
        yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _statements(node)


def _attributes(method: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.attr, node


def _parameters(function: ast.AST) -> list[str]:
    if not isinstance(function, ast.FunctionDef):
        return []
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
