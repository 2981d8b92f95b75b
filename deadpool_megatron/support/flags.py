"""Flags of Megatron-LM on the command line of a protected run: refused, reviewed, unreviewed.

Each flag of core_v0.16.1 is in exactly one row of ``tables/flags.toml``, and so are those of later
versions that somebody has looked at; what stands in no row is unreviewed as well. An unreviewed
flag or value is refused by its name, unless the user answers for it.

The arguments that Megatron has validated decide (:attr:`FlagRow.applies`). What can be read off the
command line (:meth:`FlagRow.is_named_in`) is refused before anything starts, which also helps where
Megatron acts on a flag before it validates.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from deadpool_megatron.hookpoints import ALLOW_UNREVIEWED, FLAG

_TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "tables" / "flags.toml").read_text()
)


@dataclass(frozen=True)
class FlagRow:
    """One row of what is refused. ``shown``: the flags that lead here, as a user writes them.

    ``when``: conditions on the validated arguments, each of which is enough; none: one of the flags
    is set. ``only_with``: the package, or newer Megatron-LM, without which the parser does not know
    them; empty: that of 0.16.1 does.
    """

    shown: str
    reason: str
    when: tuple[str, ...] = ()
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

    def applies(self, args: argparse.Namespace) -> bool:
        """Return whether these arguments are refused by this row."""
        conditions = self.when or [flag[2:].replace("-", "_") for flag in self.flags]
        return any(
            all(_holds(term, args) for term in condition.split(" and ")) for condition in conditions
        )

    def is_named_in(self, argv: Sequence[str]) -> bool:
        """Return whether this can be told from the command line alone."""
        words = _words(argv)
        return not set(words).isdisjoint(self.shown.split(", ")) or self.applies(_said(words))


@dataclass(frozen=True)
class FlagFamily:
    """Flags that are judged alike. ``reason``: why they may pass, or why nobody vouches for them;
    ``names``: without their dashes, parted by blanks.
    """

    title: str
    reason: str
    names: str

    @property
    def flags(self) -> tuple[str, ...]:
        """As a user writes them."""
        return tuple(f"--{name}" for name in self.names.split())


def _refused(row: dict[str, Any]) -> FlagRow:
    when = row.get("when", ())
    reason = row["reason"].format_map(_TABLES["shared"])
    return FlagRow(**{**row, "reason": reason, "when": (when,) if isinstance(when, str) else when})


#: all rows, in the order in which they are looked at
REFUSED = tuple(map(_refused, _TABLES["refused"]))
REVIEWED = tuple(FlagFamily(**row) for row in _TABLES["reviewed"])
UNREVIEWED = tuple(FlagFamily(**row) for row in _TABLES["unreviewed"])
#: scripts of Megatron-LM that were never run under protection
UNREVIEWED_SCRIPTS: tuple[str, ...] = tuple(_TABLES["scripts"])
#: by flag, those that were read of the flags whose values Megatron-LM's parser lists
VALUES: dict[str, tuple[str, ...]] = {
    flag: tuple(values.split()) for flag, values in _TABLES["values"].items()
}


def refused(args: argparse.Namespace) -> str:
    """Return one line about all rows that these validated arguments run into; empty if none."""
    return _complaint(row for row in REFUSED if row.applies(args))


def refused_or_unreviewed(command: Sequence[str]) -> str:
    """Return one line about what the command line of a script alone shows; empty for nothing.

    What is refused comes first: its rows have better advice.
    """
    return _complaint(row for row in REFUSED if row.is_named_in(command[1:])) or unreviewed(command)


def unreviewed(argv: Sequence[str]) -> str:
    """Return one line about what is on the command line of a script that nobody vouches for; empty
    when there is nothing."""
    answered_for = set(allowed(argv))
    found = [name for name in _unvouched(argv) if name.lstrip("-") not in answered_for]
    if not found:
        return ""
    first = found[0]
    others = f" (unreviewed as well: {', '.join(found[1:])})" if found[1:] else ""
    return (
        f"{first} is not reviewed: {_why_unreviewed(first)}; leave it out, or answer for it"
        f" yourself with {ALLOW_UNREVIEWED} {first.lstrip('-')}{others}"
    )


def let_through(argv: Sequence[str]) -> list[str]:
    """Return what is unreviewed and on the command line all the same, for the log."""
    answered_for = set(allowed(argv))
    return [name for name in _unvouched(argv) if name.lstrip("-") in answered_for]


def allowed(argv: Sequence[str]) -> list[str]:
    """Return the names that a command line gives behind :data:`ALLOW_UNREVIEWED`."""
    pairs = itertools.pairwise(_words(argv))
    return [value.lstrip("-") for flag, value in pairs if flag == ALLOW_UNREVIEWED]


def one_logger_complaint(args: argparse.Namespace) -> str:
    """Return one line where Megatron-LM would open one_logger; empty where it would not.

    Megatron opens it in each pass, also for a spare, wherever the package is there.
    """
    if not getattr(args, "enable_one_logger", False) or not _is_installed("one_logger"):
        return ""
    return (
        "one_logger cannot be protected: each process of a spare would open it as the last rank;"
        " give --no-one-logger"
    )


def as_markdown() -> str:
    """Return the table of what is refused, for people."""
    rows = [
        f"| {', '.join(f'`{part}`' for part in row.shown.split(', '))} | {row.reason}"
        f" | {row.remedy} |"
        for row in REFUSED
    ]
    return "\n".join(("| flag | why | instead |", "| --- | --- | --- |", *rows)) + "\n"


def _complaint(rows: Iterable[FlagRow]) -> str:
    found = list(rows)
    if not found:
        return ""
    others = ", ".join(row.shown for row in found[1:])
    return found[0].line + (f" (refused as well: {others})" if others else "")


def _holds(term: str, args: argparse.Namespace) -> bool:
    """Return whether arguments meet ``NAME`` (set, to anything that is not empty) or ``NAME TEST
    VALUES``. An argument that a version does not have counts as not set."""
    name, _, rest = term.partition(" ")
    test, _, text = rest.partition(" ")
    value = getattr(args, name, None)
    match test:
        case "":
            return bool(value)
        case "known":
            return hasattr(args, name)
        case "given":
            return value is not None
        case "is":
            return value in text.split()
        case "is-not":
            return value is not None and value not in text.split()
        case "above":
            return isinstance(value, int) and value > int(text)
        case "begins":
            return str(value or "").startswith(text)
    raise ValueError(f"no such condition: {term}")


def _words(argv: Iterable[str]) -> list[str]:
    """Return the words of a command line; ``--flag=value`` is ``--flag value``."""
    return [
        word
        for argument in argv
        for word in (argument.split("=", 1) if argument.startswith("--") else (argument,))
    ]


def _said(words: Sequence[str]) -> argparse.Namespace:
    """Return each flag with the word behind it, for flags whose argument has their name."""
    named = {
        flag.removeprefix("--").replace("-", "_"): int(value) if value.isdigit() else value
        for flag, value in itertools.pairwise(words)
        if flag.startswith("--")
    }
    return argparse.Namespace(**named)


def _unvouched(argv: Sequence[str]) -> list[str]:
    """Return the script, if it is one of Megatron-LM's that was never tried, each flag that is
    neither reviewed, nor in a row, nor of deadpool itself, and each value that came to a flag
    after it was read."""
    known = {flag for row in REFUSED for flag in row.flags}
    known |= {flag for family in REVIEWED for flag in family.flags}
    flags = [_words([argument])[0] for argument in argv[1:]]
    return [
        *(
            name
            for name in (PurePath(each).name for each in argv[:1])
            if name in UNREVIEWED_SCRIPTS
        ),
        *dict.fromkeys(
            flag
            for flag in flags
            if flag.startswith("--")
            and flag not in known
            and not flag.startswith(f"{FLAG}-")
            and flag != FLAG
        ),
        *dict.fromkeys(_unread_values(argv[1:])),
    ]


def _why_unreviewed(name: str) -> str:
    if not name.startswith("--"):
        return "only pretrain_gpt.py was ever run under protection"
    reasons = (family.reason for family in UNREVIEWED if name in family.flags)
    return next(reasons, "nobody has looked at what it does to state, communicators and streams")


def _unread_values(argv: Sequence[str]) -> Iterator[str]:
    """Yield what is given for a flag of :data:`VALUES` and was not read, as ``--flag=value``,
    unless a row refuses it, whose advice is better."""
    flag = ""
    for word in _words(argv):
        if word.startswith("--"):
            flag = word
        elif word not in VALUES.get(flag, (word,)) and not any(
            row.is_named_in([flag, word]) for row in REFUSED
        ):
            yield f"{flag}={word}"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
