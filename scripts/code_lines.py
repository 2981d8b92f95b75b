#!/usr/bin/env python
"""Count the lines that a maintainer has to keep in mind, and compare them with the ceilings.

    .venv/bin/python scripts/code_lines.py
    .venv/bin/python scripts/code_lines.py --files --json

A line of code is neither blank, nor comment, nor docstring. Counted are the package with its
data files written by hand, the Python of scripts/ and of tests/, the statements of transcripts
(calls/*.txt) as lines of tests, the shell of scripts/; of docs/ every line of its pages. The
ceilings stand in pyproject.toml under [tool.deadpool.ceilings]; a change may lower them, never
raise them.

Exit status: 0 all within their ceilings; 1 something is above its ceiling; 2 bad arguments.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Written by a program from what stands in the code.
_MADE = {"deadpool_megatron/events.schema.json"}
_PARTS = {
    "package": ("deadpool_megatron", {".py", ".js", ".css", ".html", ".toml", ".json"}),
    "scripts": ("scripts", {".py"}),
    "shell": ("scripts", {".sh", ".sbatch"}),
    "tests": ("tests", {".py", ".txt"}),
    "docs": ("docs", {".md"}),
}
_COMMENTS = {
    ".js": ("//", "/*", "*/"),
    ".css": ("/*", "/*", "*/"),
    ".html": ("<!--", "<!--", "-->"),
}
_QUOTES = re.compile(rb"[rbf]*(\"\"\"|''')")


def count(file: Path) -> int:
    """Return the lines of code of a file, or all lines of a page of documentation."""
    text = file.read_text()
    if file.suffix == ".md":
        return len(text.splitlines())
    if file.suffix == ".txt":  # the statements of transcripts, as a program writes their answers
        text = re.sub(r"(?m)^(    |== ).*", "", text) if file.parent.name == "calls" else ""
    return _python(text) if file.suffix == ".py" else _other(text, file.suffix)


def _python(text: str) -> int:
    lines = text.splitlines()
    documented, quoted = set[int](), set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                documented.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        elif isinstance(node, ast.Constant | ast.JoinedStr) and _QUOTES.match(
            lines[node.lineno - 1].encode(), node.col_offset
        ):
            quoted.update(range(node.lineno, (node.end_lineno or 0) + 1))
    written = {number for number, line in enumerate(lines, 1) if line.strip()}
    comments = {number for number in written if lines[number - 1].lstrip().startswith("#")}
    return len(written - documented - (comments - quoted))


def _other(text: str, suffix: str) -> int:
    line_mark, begin, end = _COMMENTS.get(suffix, ("#", "", ""))
    found, inside = 0, False
    for line in map(str.strip, text.splitlines()):
        if begin and line.startswith(begin):
            inside = True
        found += bool(line) and not inside and not line.startswith(line_mark)
        inside = inside and not line.endswith(end)
    return found


def by_file(root: Path = ROOT) -> dict[str, dict[str, int]]:
    """Return, for each part of the tree, the lines of each of its files."""
    return {
        part: {
            name: count(file)
            for file in sorted((root / folder).rglob("*"))
            if file.suffix in suffixes and (name := str(file.relative_to(root))) not in _MADE
        }
        for part, (folder, suffixes) in _PARTS.items()
    }


def ceilings(pyproject: str) -> dict[str, int]:
    """Return the most lines that each part may have."""
    written = tomllib.loads(pyproject)["tool"]["deadpool"]["ceilings"]
    return {part: written[part] for part in _PARTS}


def main() -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", action="store_true", help="each file, too")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args()
    files = by_file()
    sums = {part: sum(lines.values()) for part, lines in files.items()}
    allowed = ceilings((ROOT / "pyproject.toml").read_text())
    if arguments.json:
        table = {part: {"lines": sums[part], "ceiling": allowed[part]} for part in sums}
        print(json.dumps(table | ({"files": files} if arguments.files else {}), indent=1))
    else:
        for part, lines in files.items():
            print(f"{part:8} {sums[part]:7,} of {allowed[part]:7,}  in {len(lines):,} files")
            for name, number in lines.items() if arguments.files else ():
                print(f"  {number:6,}  {name}")
    return int(any(sums[part] > allowed[part] for part in sums))


if __name__ == "__main__":
    sys.exit(main())
