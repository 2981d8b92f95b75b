"""Lives line by line: a file has events and, below each, its expected effects.

A line at the margin is an event; the indented lines below it are all its effects. A life begins
with ``== its name {its options}``; the lines before the first life begin each of them, and show
nothing. An intended change changes these files as well: with ``DEADPOOL_TEST_WRITE=1`` in the
environment they are written again, and the difference is reviewed like that of any other file.
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
    """Return JSON without the keys whose values differ from run to run."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items() if not volatile.search(str(k))}
        if isinstance(value, set | frozenset):
            return sorted(value)
        return [plain(each) for each in value] if isinstance(value, list | tuple) else value

    return json.dumps(plain(value), sort_keys=True)


def compare(path: Path, live: Live, directory: Path) -> None:
    """Compare a file. ``live(script, options, directory)``: the script's lines with effects."""
    before, *parts = re.split("(?m)^== ", path.read_text())
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
    """Compare the lines of a life, which may contain line breaks, with a file."""
    found = "\n".join(lines)
    if os.environ.get("DEADPOOL_TEST_WRITE"):
        path.write_text(found + "\n")
    expected = path.read_text().splitlines()
    difference = difflib.unified_diff(expected, found.splitlines(), lineterm="", n=1)
    assert found.splitlines() == expected, "\n".join(difference)
