"""The version of Megatron-LM, and whether it has the functions that the hooks need.

At the start of a run, an untested version is checked for the names that the hooks require
(``tables/names.toml``). The check reads the source and imports nothing of Megatron, so it also
finds attributes that methods set on ``self``.

:func:`install_points` wraps the hooked functions at run time, in a tree that ``deadpool patch`` has
not changed. It also replaces the references that ``from ... import`` has made.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from deadpool_megatron import hookpoints

_TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "tables" / "versions.toml").read_text()
)
#: the tested versions, as package_info.py gives them
TESTED: tuple[str, ...] = tuple(_TABLES["tested"])
#: version in package_info.py -> a tested commit without a tag, and the hash of its sources
COMMITS: dict[str, dict[str, str]] = _TABLES["commits"]
_TESTED_TEXT = ", ".join([*TESTED, *(f"{key} at {row['commit']}" for key, row in COMMITS.items())])
#: MAJOR.MINOR -> properties of the version, which include those of earlier versions
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
    """This Megatron-LM was not tested, or cannot work; the message gives the reason."""


@dataclass(frozen=True)
class FoundPoint:
    """A hook point in an examined Megatron. ``missing_parameters``: the parameters that the handler
    requires and that the function lacks."""

    point: hookpoints.Point
    is_missing: bool = False
    missing_parameters: tuple[str, ...] = ()

    @property
    def problem(self) -> str:
        """The problem in a line; empty without a problem."""
        name = f"{self.point.module}.{self.point.function}"
        if self.is_missing:
            return f"{name} is missing"
        if self.missing_parameters:
            return f"{name} lacks the parameter {', '.join(self.missing_parameters)}"
        return ""


@dataclass(frozen=True)
class VersionReport:
    """The findings of :func:`examine`. ``version``: the version of the megatron.core in use;
    ``tree_version``: that of the megatron.core next to megatron.training, empty without it.
    ``missing_names``: the names of ``tables/names.toml`` that an untested version lacks.
    """

    version: str
    tree_version: str
    points: tuple[FoundPoint, ...]
    is_tested: bool
    missing_names: tuple[str, ...] = ()

    @property
    def missing_points(self) -> tuple[FoundPoint, ...]:
        """Points that do not exist."""
        return tuple(point for point in self.points if point.is_missing)


def examine(importer: Importer = importlib.import_module) -> VersionReport:
    """Examine the Megatron-LM that ``importer`` imports."""
    version, tree = released(importer(_PACKAGE_INFO).__version__), _tree(importer)
    is_tested = version in TESTED or _is_tested_commit(version, tree)
    return VersionReport(
        version=version,
        tree_version=tree_version(tree),
        points=tuple(_find_point(point, importer) for point in hookpoints.points_of(version)),
        is_tested=is_tested,
        # Tests cover the names of tested versions, and a check of the source takes a second.
        missing_names=() if is_tested or tree is None else missing_names(tree, version),
    )


def _is_tested_commit(version: str, tree: Path | None) -> bool:
    """Return whether the sources are those of a tested commit. The version does not show this, as
    many commits of the main branch have the same version, and an archive does not name its
    commit."""
    return (
        tree is not None
        and version in COMMITS
        and (COMMITS[version]["sources"] == source_hash(tree))
    )


def source_hash(tree: Path) -> str:
    """Return a hash of the names and contents of Megatron's Python files in ``tree``."""
    digest = hashlib.sha256()
    for path in sorted((tree / "megatron").rglob("*.py")):
        digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def released(version: str) -> str:
    """Return a version without the commit that Megatron appends in a git checkout."""
    return version.partition("+")[0]


def _tree(importer: Importer) -> Path | None:
    """Return the folder of the ``megatron`` package that has megatron.training; None without it."""
    try:
        place = getattr(importer("megatron.training"), "__file__", None)
    except ImportError:
        return None
    return None if place is None else Path(place).parents[2]


def tree_of(script: Path) -> Path:
    """Return the checkout that a script trains with: its own folder, a folder of PYTHONPATH, or a
    parent folder. Return its own folder if none of these is a checkout."""
    script_folder = script.resolve().parent
    path = (Path(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each)
    for folder in (script_folder, *path, *script_folder.parents):
        if (folder / "megatron" / "training").is_dir():
            return folder.resolve()
    return script_folder


def tree_version(tree: Path | None) -> str:
    """Return the version of megatron.core in a tree, empty without it. As megatron is a namespace
    package, megatron.core may come from a wheel, and megatron.training from a tree."""
    if tree is None:
        return ""
    info = tree / "megatron" / "core" / "package_info.py"
    return released(runpy.run_path(str(info))["__version__"]) if info.is_file() else ""


def _find_point(point: hookpoints.Point, importer: Importer) -> FoundPoint:
    try:
        function = getattr(importer(point.module), point.function, None)
    except ImportError:
        function = None
    if function is None:
        return FoundPoint(point, is_missing=True)
    # For a wrapped function, the signature is that of the original.
    parameters = inspect.signature(function).parameters
    missing = tuple(name for name in point.parameters if name not in parameters)
    return FoundPoint(point, missing_parameters=missing)


def check(report: VersionReport, allow_untested: bool) -> None:
    """Raise UntestedMegatron unless this Megatron is tested, or may be used untested.

    ``allow_untested`` accepts an untested version that has all required names. It accepts neither
    missing names nor two Megatrons in a process.
    """
    if report.tree_version and report.tree_version != report.version:
        raise UntestedMegatron(
            f"two Megatrons: megatron.core is {report.version}, megatron.training belongs to"
            f" {report.tree_version}; put the folder of your training script first in PYTHONPATH"
        )
    if report.missing_names:
        raise UntestedMegatron(
            f"protection has not been tested with Megatron-LM {report.version}, which lacks"
            f" {'; '.join(report.missing_names)}; tested versions: {_TESTED_TEXT}"
        )
    if allow_untested and not report.missing_points:
        return
    problems = [point.problem for point in report.points if point.problem]
    if not report.is_tested:
        problems.insert(0, f"its version is {report.version}; tested versions: {_TESTED_TEXT}")
    if not problems:
        return
    advice = f"{hookpoints.ALLOW_UNTESTED} uses it nevertheless"
    if report.missing_points:
        advice = "without these functions there is no protection"
    raise UntestedMegatron(
        f"protection has not been tested with this Megatron-LM: {'; '.join(problems)}; {advice}"
    )


def install_points() -> tuple[str, ...]:
    """Wrap the function of each point as a hook point: in its module, and in all loaded modules of
    Megatron and of the training script that have imported the function. Return the names of the
    wrapped functions, none in a patched tree or in a second call.

    Raises UntestedMegatron for a partly patched tree.
    """
    version = released(importlib.import_module(_PACKAGE_INFO).__version__)
    points, unmarked = hookpoints.points_of(version), dict[hookpoints.Point, Any]()
    for point in points:
        function = getattr(importlib.import_module(point.module), point.function)
        if not hookpoints.is_marked(function):
            unmarked[point] = function
    if unmarked and len(unmarked) < len(points):
        modules = ", ".join(sorted({point.module for point in unmarked}))
        raise UntestedMegatron(
            "this Megatron-LM is patched in part: run 'deadpool patch apply' or 'deadpool patch"
            f" revert' on it (not patched are {modules})"
        )
    for original in unmarked.values():
        wrapper = hookpoints.hookpoint(original)
        for namespace in _namespaces():
            for name in [name for name, value in namespace.items() if value is original]:
                namespace[name] = wrapper
    return tuple(f"{point.module}.{point.function}" for point in unmarked)


def _namespaces() -> Iterator[dict[str, Any]]:
    """Yield the namespaces of the loaded modules that may have imported a function of Megatron."""
    modules: Mapping[str, ModuleType | None] = dict(sys.modules)
    for name, module in modules.items():
        may_hold = name == "__main__" or name.startswith(("megatron.", "pretrain_"))
        if may_hold and module is not None:
            yield vars(module)


@dataclass(frozen=True)
class Name:
    """The name of a function, a class, a method, an attribute or a variable in a file of
    Megatron-LM. ``parameters``: the parameters of a function that the hooks use. ``versions``: the
    versions (MAJOR.MINOR) that have the name.
    """

    file: str
    name: str
    parameters: tuple[str, ...] = ()
    versions: tuple[str, ...] = VERSIONS


def _names() -> Iterator[Name]:
    """Yield the names of the hook points, and those of ``tables/names.toml``."""
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
    """Return the names that a version must have; for an untested version, those of the newest."""
    family = next((each for each in VERSIONS if version.startswith(f"{each}.")), VERSIONS[-1])
    return tuple(name for name in NAMES if family in name.versions)


def missing_names(tree: Path, version: str) -> tuple[str, ...]:
    """Return descriptions of the names that the source in ``tree`` lacks."""
    sources: dict[str, ast.Module] = {}
    texts = (_missing_name(tree, name, sources) for name in expected_in(version))
    return tuple(filter(None, texts))


def _missing_name(tree: Path, name: Name, sources: dict[str, ast.Module]) -> str:
    """Return a description of a name that is missing in ``tree``, or of its missing parameters;
    empty if it is complete. ``sources``: the parsed files so far."""
    file = tree / name.file
    if name.file not in sources:
        sources[name.file] = ast.parse(file.read_text() if file.is_file() else "")
    node = find(sources[name.file], name.name)
    if node is None:
        return f"{name.name} in {name.file}"
    if not name.parameters:
        return ""
    present = _parameters(node)
    missing = [parameter for parameter in name.parameters if parameter not in present]
    return f"{', '.join(missing)} of {name.name}() in {name.file}" if missing else ""


def find(scope: ast.AST, name: str) -> ast.AST | None:
    """Return the outermost node in ``scope`` that defines the dotted ``name``, or None."""
    for part in name.split("."):
        inner = next((node for node in ast.walk(scope) if part in _defined(node)), None)
        if inner is None:
            return None
        scope = inner
    return scope


def _defined(node: ast.AST) -> Iterable[str]:
    """Return the names that a statement, or the target of an assignment, defines; an attribute of
    ``self`` is such a target, too."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return (node.name,)
        case ast.Import() | ast.ImportFrom():
            return (alias.asname or alias.name for alias in node.names)
        case ast.Name(ctx=ast.Store()):
            return (node.id,)
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            return (node.attr,)
    return ()


def _parameters(function: ast.AST) -> list[str]:
    if not isinstance(function, ast.FunctionDef):
        return []
    args = function.args
    return [each.arg for each in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
