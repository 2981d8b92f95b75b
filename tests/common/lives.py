"""Lives line by line, with what comes of each: a file is what happens and what is expected.

A line at the margin is what happens; below it, indented, is all that comes of it. A life begins
with ``== its name {its options}``; what stands before the first one begins each of them, and shows
nothing. A change that is meant changes these files as well: with
``DEADPOOL_TEST_WRITE=1`` in the environment they are written again, and the difference is read like
that of any other file.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Live = Callable[[Sequence[str], dict[str, Any], Path], list[str]]


def text(value: Any, volatile: re.Pattern[str]) -> str:
    """JSON without what differs from one time to the next, which is known by its name."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items() if not volatile.search(str(k))}
        if isinstance(value, set | frozenset):
            return sorted(value)
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return json.dumps(plain(value), sort_keys=True)


def compare(path: Path, live: Live, directory: Path) -> None:
    """``live(script, options, directory)``: the lines of the script, each with what comes of it."""
    before, *parts = path.read_text().split("== ")
    always = before.splitlines()
    found = [*always]
    for number, life in enumerate(parts):
        header, *script = [line for line in life.splitlines() if not line.startswith("    ")]
        options = json.loads(header[header.index("{") :] if "{" in header else "{}")
        (directory / str(number)).mkdir()
        lines = live([*always, *script], options, directory / str(number))
        found += [f"== {header}", *lines[len(always) :]]
    hold(path, found)


def hold(path: Path, lines: Sequence[str]) -> None:
    """Hold what was written down in a life, which may have several lines in one, against a file."""
    found = "\n".join(lines)
    if os.environ.get("DEADPOOL_TEST_WRITE"):
        path.write_text(found + "\n")
    expected = path.read_text().splitlines()
    difference = difflib.unified_diff(expected, found.splitlines(), lineterm="", n=1)
    assert found.splitlines() == expected, "\n".join(difference)
