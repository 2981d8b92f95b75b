"""The version of Megatron-LM, and whether it has the functions that the hooks take part in.

:func:`install_points` wraps those functions at run time, for a tree that ``deadpool patch`` has not
changed. Copies that ``from ... import`` has made of them are replaced as well.
"""

from __future__ import annotations

import importlib
import inspect
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from deadpool_megatron.hookpoints import ALLOW_UNTESTED, Point, hookpoint, is_marked, points_of
from deadpool_megatron.support import names

_TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "tables" / "versions.toml").read_text()
)
#: what package_info.py says of those that were tried
TESTED: tuple[str, ...] = tuple(_TABLES["tested"])
#: by MAJOR.MINOR, the newest last: where its versions differ from others
FAMILIES: dict[str, dict[str, Any]] = _TABLES["families"]
_PACKAGE_INFO = "megatron.core.package_info"
Importer = Callable[[str], Any]


class UntestedMegatron(RuntimeError):
    """This Megatron-LM was never tried, or cannot work; one line says what was found."""


@dataclass(frozen=True)
class FoundPoint:
    """One point as it was found. ``lacks``: parameters that the handler relies on."""

    point: Point
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
    of the one which lies beside megatron.training (empty: none does). ``lacking``: names of
    :mod:`.names` that a version which was never tried does not have.
    """

    version: str
    beside: str
    points: tuple[FoundPoint, ...]
    lacking: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[FoundPoint, ...]:
        """Points that do not exist."""
        return tuple(found for found in self.points if found.missing)


def examine(importer: Importer = importlib.import_module) -> Report:
    """Look at the Megatron-LM that can be imported. ``importer``: how."""
    version, tree = released(importer(_PACKAGE_INFO).__version__), _tree(importer)
    # Of those that were tried the tests know; reading the source takes a second.
    untried = tree is not None and version not in TESTED
    return Report(
        version=version,
        beside=_version_beside(tree),
        points=tuple(_look_at(point, importer) for point in points_of(version)),
        lacking=names.lacking(tree, version) if tree is not None and untried else (),
    )


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


def _version_beside(tree: Path | None) -> str:
    """megatron is a namespace package: its core may come from a wheel, its training from a tree."""
    if tree is None:
        return ""
    info = tree / "megatron" / "core" / "package_info.py"
    return released(runpy.run_path(str(info))["__version__"]) if info.is_file() else ""


def _look_at(point: Point, importer: Importer) -> FoundPoint:
    try:
        function = getattr(importer(point.module), point.function, None)
    except ImportError:
        function = None
    if function is None:
        return FoundPoint(point, missing=True)
    # Also of a wrapped function these are the parameters of the original.
    parameters = inspect.signature(function).parameters
    lacks = tuple(name for name in point.parameters if name not in parameters)
    return FoundPoint(point, lacks=lacks, marked=is_marked(function))


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
            f" {'; '.join(report.lacking)}; tried were {', '.join(TESTED)}"
        )
    if allow_untested and not report.missing:
        return
    troubles = [found.trouble for found in report.points if found.trouble]
    if report.version not in TESTED:
        troubles.insert(0, f"its version is {report.version}; tried were {', '.join(TESTED)}")
    if not troubles:
        return
    advice = (
        "without these functions there is no protection"
        if report.missing
        else f"{ALLOW_UNTESTED} tries nevertheless"
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
        for point in points_of(released(importlib.import_module(_PACKAGE_INFO).__version__))
    }
    waiting = {point: one for point, one in originals.items() if not is_marked(one)}
    if waiting and len(waiting) < len(originals):
        left = ", ".join(sorted({point.module for point in waiting}))
        raise UntestedMegatron(
            "this Megatron-LM is patched in part: run 'deadpool patch apply' or 'deadpool patch"
            f" revert' on it (not patched are {left})"
        )
    for original in waiting.values():
        marked = hookpoint(original)
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
