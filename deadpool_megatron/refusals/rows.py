"""A row of the table of refusals, and the conditions that rows are made of."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FlagRow:
    """One row. ``shown``: the flags that lead here, as a user writes them.

    ``only_with``: the package, or newer Megatron-LM, without which the parser does not know them;
    empty: that of 0.16.1 does.
    """

    shown: str
    applies: Callable[[argparse.Namespace], bool]
    reason: str
    remedy: str = "leave it out"
    only_with: str = ""

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of :attr:`shown`, without values."""
        return tuple(re.findall(r"--[a-z0-9-]+", self.shown))

    @property
    def line(self) -> str:
        """Return what the user is told."""
        return f"{self.shown} cannot be protected: {self.reason}; {self.remedy}"

    def is_named_in(self, argv: Sequence[str]) -> bool:
        """Return whether this can be told from the command line alone."""
        words = [word for argument in argv for word in split_words(argument)]
        return not set(words).isdisjoint(self.shown.split(", ")) or self.applies(_said(words))


def split_words(argument: str) -> list[str]:
    """``--flag=value`` is ``--flag value``."""
    return argument.split("=", 1) if argument.startswith("--") else [argument]


def _said(words: Sequence[str]) -> argparse.Namespace:
    """Each flag with the word behind it, for flags whose argument has their name."""
    named = {
        flag.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
        for flag, value in itertools.pairwise(words)
        if flag.startswith("--")
    }
    return argparse.Namespace(**named)


def complaint(rows: Iterable[FlagRow]) -> str:
    """One line about all of these; empty when there are none."""
    found = list(rows)
    if not found:
        return ""
    others = ", ".join(row.shown for row in found[1:])
    return found[0].line + (f" (refused as well: {others})" if others else "")


def on(*names: str) -> Callable[[argparse.Namespace], bool]:
    """One of these arguments is set, to anything that is not empty."""
    return lambda args: any(getattr(args, name, None) for name in names)


def given(name: str) -> Callable[[argparse.Namespace], bool]:
    """The argument is set; zero counts."""
    return lambda args: getattr(args, name, None) is not None


def above(name: str, most: int) -> Callable[[argparse.Namespace], bool]:
    def applies(args: argparse.Namespace) -> bool:
        value = getattr(args, name, None)
        return isinstance(value, int) and value > most

    return applies


def among(name: str, *values: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: getattr(args, name, None) in values


def begins(name: str, start: str) -> Callable[[argparse.Namespace], bool]:
    return lambda args: str(getattr(args, name, None) or "").startswith(start)


def other_than(name: str, *values: str | None) -> Callable[[argparse.Namespace], bool]:
    """Arguments that a version does not have count as not set."""
    return lambda args: getattr(args, name, values[0]) not in values
