#!/usr/bin/env python3
"""Make the patch set of a tag of Megatron-LM, from its source and the texts of another set.

    python scripts/make_patches.py CHECKOUT patches/core_v0.17.1 patches/core_v0.18.2

Every function of `POINTS` (deadpool_megatron/hookpoints.py) that the version has is marked, and
each file imports the mark below its last import. The second folder has the text above each patch,
and the files that must be those of the tag; the third is made. Read the result before you commit
it: the text above a patch must be true of it.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import runpy
import sys
from pathlib import Path

from deadpool_megatron.hookpoints import Point, points_of

_IMPORT = "from deadpool_megatron.hookpoints import hookpoint\n"
_MARK = "@hookpoint\n"
_HEAD = (
    "# SHA-256 of each file as released, and patched (-: not patched, but it has to be that of the"
    " tag)"
)


def marked(source: str, functions: set[str]) -> str:
    """Return ``source`` with the import, and the mark above each of ``functions``."""
    imports = 0
    above = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom) and not above:
            imports = node.end_lineno or node.lineno
        if isinstance(node, ast.FunctionDef) and node.name in functions:
            above.append(min([node.lineno, *(each.lineno for each in node.decorator_list)]))
    lines = source.splitlines(keepends=True)
    for line in sorted(above, reverse=True):
        lines.insert(line - 1, _MARK)
    lines.insert(imports, _IMPORT)
    assert lines.count(_MARK) == len(functions), functions
    return "".join(lines)


def make(checkout: Path, source_set: Path, target: Path) -> None:
    """Write the patches and the table of hashes."""
    info = runpy.run_path(str(checkout / "megatron" / "core" / "package_info.py"))
    points = points_of(str(info["__version__"]))
    target.mkdir(exist_ok=True)
    patched: dict[str, str] = {}
    for patch in sorted(source_set.glob("*.patch")):
        description, _, rest = patch.read_text().partition("--- a/")
        name = rest.partition("\n")[0]
        source = (checkout / name).read_bytes().decode()
        patched[name] = marked(source, {each.function for each in points if _file(each) == name})
        difference = difflib.unified_diff(
            source.splitlines(keepends=True),
            patched[name].splitlines(keepends=True),
            f"a/{name}",
            f"b/{name}",
            n=1,
        )
        (target / patch.name).write_text(description + "".join(difference))
    lines = [_HEAD]
    for line in (source_set / "hashes").read_text().splitlines()[1:]:
        name = line.split()[2]
        changed = _hash(patched[name].encode()) if name in patched else "-"
        lines.append(f"{_hash((checkout / name).read_bytes())} {changed} {name}")
    (target / "hashes").write_text("\n".join(lines) + "\n")


def _file(point: Point) -> str:
    return point.module.replace(".", "/") + ".py"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    make(*map(Path, sys.argv[1:]))
