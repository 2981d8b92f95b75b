"""Names in Megatron-LM that the hooks rely on, and what a source lacks of them.

A version that was never tried is held against it at the start of a run. Nothing of Megatron is
imported for that: the source is read, so that what methods set on ``self`` is seen as well.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deadpool_megatron.hookpoints import POINTS, points_of

#: as MAJOR.MINOR, the newest last
VERSIONS = ("0.16", "0.17", "0.18", "0.19")


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
    for point in POINTS:
        versions = tuple(version for version in VERSIONS if point in points_of(version))
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
