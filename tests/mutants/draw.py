"""Slips drawn at random from the core's packages, and the share that has to be noticed."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path

from coverage_map import CORE, FUNCTION_TESTS, PACKAGE
from operators import Change, changes

# A draw whose score is less probable than this, if the score of record is right, falls short.
_CHANCE = 0.01


def draw(count: int, seed: str, root: Path) -> list[tuple[str, Change]]:
    """Draw slips, each with its file: of each core package in proportion to its lines."""
    chance = random.Random(seed)
    sizes = {}
    for name in CORE:
        paths = sorted((root / PACKAGE / name).rglob("*.py"))
        sizes[name] = {path: len(path.read_text().splitlines()) for path in paths}
    total, before = sum(sum(lines.values()) for lines in sizes.values()), 0
    found: dict[tuple[str, Change], None] = {}
    for lines in sizes.values():
        before += sum(lines.values())
        while len(found) < count * before // total:
            (path,) = chance.choices(list(lines), list(lines.values()))
            by_line = defaultdict(list)
            for change in changes(path.read_text()):
                by_line[change.line].append(change)
            if by_line:
                change = chance.choice(by_line[chance.choice(list(by_line))])
                found[str(path.relative_to(root)), change] = None
    return list(found)


def tests_of(file: str, function: str, functions: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the tests of a function; without any, those of its file, or else of its package."""
    name = file.removeprefix(f"{PACKAGE}/")
    for place in (f"{name}:{function}\n", f"{name}:", f"{name.split('/')[0]}/"):
        lists = [tests for key, tests in functions.items() if f"{key}\n".startswith(place)]
        if lists:
            in_turn = chain.from_iterable(zip_longest(*lists))
            return [test for test in dict.fromkeys(in_turn) if test][:FUNCTION_TESTS]
    return []


def falls_short(noticed: int, drawn: int, share: float) -> bool:
    """Return whether a draw has fewer noticed slips than chance explains, if a share of all is."""
    terms = (
        math.comb(drawn, k) * share**k * (1 - share) ** (drawn - k) for k in range(noticed + 1)
    )
    return sum(terms) < _CHANCE
