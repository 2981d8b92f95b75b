#!/usr/bin/env python
"""Measure the cost of protection, or of a failure, and write every value.

    .venv/bin/python scripts/bench.py --list                  # the cases, each with its question
    .venv/bin/python scripts/bench.py recovery --help         # how to read a case
    .venv/bin/python scripts/bench.py overhead --rounds 4 --out overhead.json --plot overhead.png

A case prints its rows. The first figure of a row is processor time of the threads that protection
adds, which is steady within a few per cent on a busy machine, too. Times by the wall clock come
after it. A ratio is taken of pairs of runs, which take turns; its interval (95 %, Student's t on
the logarithms of the pairs) stands with it, and "unresolved" if that is wider than the effect, or
if there is only one pair. The JSON of --out has machine, versions, commit, command and every single
value; nothing is left out of a mean.

Figures of README and docs are made on a clean commit and on an idle machine. --quick shows only
that a case works.

Exit status: 0 measured; 1 a run failed, or its state is not that of an undisturbed run; 2 bad
arguments.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scripts" / "bench"
sys.path[:0] = [str(FOLDER), str(ROOT)]
CASES = sorted(path.stem for path in (FOLDER / "cases").glob("[a-z]*.py"))


def main(argv: Sequence[str]) -> int:
    """Run from the command line; returns the exit status."""
    name = argv[0].replace("-", "_") if argv else "--help"
    if name in ("__list", "_h", "__help", "--help"):
        print("\n".join(map(line_of, CASES)) if name == "__list" else __doc__)
        return 0 if argv else 2
    if name not in CASES:
        print(f"bench: no case {argv[0]!r}; there are: {', '.join(CASES)}", file=sys.stderr)
        return 2
    from common import frame

    return frame.run(importlib.import_module(f"cases.{name}"), argv[1:])


def line_of(case: str) -> str:
    """Return the line of a case: its name, its duration, and its question."""
    tree = ast.parse((FOLDER / "cases" / f"{case}.py").read_text())
    constants = (node for node in tree.body if isinstance(node, ast.Assign))
    known = {ast.unparse(node.targets[0]): ast.unparse(node.value) for node in constants}
    question = (ast.get_docstring(tree) or "").partition("\n")[0]
    return f"{case:<14} {known['MINUTES']:>4} min  {question}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
