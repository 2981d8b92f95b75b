"""The table of Megatron-LM's flags, and which of its rows a command line or arguments run into.

Each flag of core_v0.16.1 is in exactly one place of ``tables/flags.toml``, and so are those of
later versions that somebody has looked at; what stands nowhere is unread as well.

The arguments that Megatron has parsed decide (:meth:`FlagRow.applies`). What can be read off the
command line (:meth:`FlagRow.is_named_in`) is told before anything starts. :mod:`.findings` makes a
verdict of it.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import itertools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from deadpool_megatron.hookpoints import ALLOW

_TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "tables" / "flags.toml").read_text()
)


class Level(StrEnum):
    """The degree to which a protected run answers for something that it was given."""

    RUN = "run"
    SET = "set"
    ACCEPTED = "accepted"
    READ = "read"
    UNREAD = "unread"
    REFUSED = "refused"


@dataclass(frozen=True)
class FlagRow:
    """One row of what is refused, taken when the user names it, or set to something else.

    ``shown``: the flags that lead here, as a user writes them. ``when``: conditions on the
    arguments, each of which is enough; none: one of the flags is set. ``only_with``: the package,
    or newer Megatron-LM, without which the parser does not know them; empty: that of 0.16.1 does.
    ``to``: by argument, what it is set to; nothing is written as an empty text.
    """

    level: Level
    shown: str
    reason: str
    when: tuple[str, ...] = ()
    remedy: str = "leave it out"
    only_with: str = ""
    to: Mapping[str, Any] = field(default_factory=dict)

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of :attr:`shown`, without values."""
        return tuple(re.findall(r"--[a-z0-9-]+", self.shown))

    @property
    def name(self) -> str:
        """The name behind :data:`ALLOW`: of the first flag, or ``flag=value`` of its one value."""
        words = self.shown.split(", ")[0].removeprefix("--").split()
        return "=".join(words) if len(words) == 2 else words[0]

    @property
    def line(self) -> str:
        """Return what the user is told."""
        match self.level:
            case Level.SET:
                return f"{self.shown} {self.becomes}: {self.reason}"
            case Level.ACCEPTED:
                return f"{self.shown} was reviewed and never run: {self.reason}"
            case Level.READ:
                return (
                    f"{self.shown} was read and never run: {self.reason}; leave it out, or take it"
                    f" with {ALLOW} {self.name}"
                )
        return f"{self.shown} cannot be protected: {self.reason}; {self.remedy}"

    @property
    def becomes(self) -> str:
        """Words for what a row of this level sets."""
        given = [f"--{name.replace('_', '-')} {value}" for name, value in self.to.items() if value]
        return f"becomes {', '.join(given)}" if given else "is removed"

    def applies(self, args: argparse.Namespace) -> bool:
        """Return whether these arguments run into this row."""
        conditions = self.when or [flag[2:].replace("-", "_") for flag in self.flags]
        return any(
            all(_holds(term, args) for term in condition.split(" and ")) for condition in conditions
        )

    def is_named_in(self, argv: Sequence[str], version: str = "") -> bool:
        """Return whether this can be told from the command line alone. ``version``: of Megatron-LM,
        whose defaults hold then; empty: the newest."""
        # An argument may have another name than its flag, which is enough unless more is asked.
        named = not set(words_of(argv)).isdisjoint(self.shown.split(", "))
        more = any(" and " in condition for condition in self.when)
        return (named and not more) or self.applies(said(argv, version))

    def as_given(self, argv: Sequence[str]) -> FlagRow:
        """Return the row with those of its flags alone that ``argv`` names, if it names any."""
        named = ", ".join(flag for flag in self.flags if flag in words_of(argv))
        return replace(self, shown=named) if named else self

    def set_in(self, args: argparse.Namespace) -> None:
        """Set what this row sets."""
        for name, value in self.to.items():
            setattr(args, name, None if value == "" else value)


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


def _row(level: Level, row: dict[str, Any]) -> FlagRow:
    when = row.get("when", ())
    reason = row["reason"].format_map(_TABLES["shared"])
    return FlagRow(
        level, **{**row, "reason": reason, "when": (when,) if isinstance(when, str) else when}
    )


def _rows(level: Level) -> tuple[FlagRow, ...]:
    return tuple(_row(level, row) for row in _TABLES[level])


#: all rows of each level, in the order in which they are looked at
REFUSED, READ, SET, ACCEPTED = map(_rows, (Level.REFUSED, Level.READ, Level.SET, Level.ACCEPTED))
ROWS = (*REFUSED, *READ, *SET, *ACCEPTED)
REVIEWED = tuple(FlagFamily(**row) for row in _TABLES["reviewed"])
UNREVIEWED = tuple(FlagFamily(**row) for row in _TABLES["unreviewed"])
#: scripts of Megatron-LM that were never run under protection
UNREVIEWED_SCRIPTS: tuple[str, ...] = tuple(_TABLES["scripts"])
#: by flag, those that were read of the flags whose values Megatron-LM's parser lists
VALUES: dict[str, tuple[str, ...]] = {
    flag: tuple(values.split()) for flag, values in _TABLES["values"].items()
}
#: by MAJOR.MINOR from which on they hold, defaults that run into a row
DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]


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


def _holds(term: str, args: argparse.Namespace) -> bool:
    """Return whether arguments meet ``NAME`` (set, to anything that is not empty) or ``NAME TEST
    VALUES``. An argument that a version does not have counts as not set."""
    name, _, rest = term.partition(" ")
    test, _, text = rest.partition(" ")
    value = getattr(args, name, None)
    value = getattr(value, "name", value)  # of an enumeration, as users write it
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
        case "has":
            return any(part in str(value or "") for part in text.split())
    raise ValueError(f"no such condition: {term}")


def words_of(argv: Iterable[str]) -> list[str]:
    """Return the words of a command line; ``--flag=value`` is ``--flag value``."""
    return [
        word
        for argument in argv
        for word in (argument.split("=", 1) if argument.startswith("--") else (argument,))
    ]


def said(argv: Sequence[str], version: str = "") -> argparse.Namespace:
    """Return each flag with the word behind it, for flags whose argument has their name, and the
    defaults of ``version`` (empty: the newest) that a row asks for."""
    words = words_of(argv)
    named: dict[str, Any] = {}
    for since, defaults in DEFAULTS.items():
        if not version or _number(version) >= _number(since):
            named |= defaults
    for flag, value in itertools.zip_longest(words, words[1:], fillvalue="--"):
        if flag.startswith("--"):
            named[flag.removeprefix("--").replace("-", "_")] = value.startswith("--") or (
                int(value) if value.isdigit() else value
            )
    return argparse.Namespace(**named)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def is_known(name: str) -> bool:
    """Return whether some version of Megatron-LM has this flag or script."""
    return name in UNREVIEWED_SCRIPTS or any(name in family.flags for family in UNREVIEWED)


def why_unread(name: str) -> str:
    """Return the reason for which nobody vouches for a flag, a value or a script."""
    if not name.startswith("--"):
        return "only pretrain_gpt.py was ever run under protection"
    reasons = (family.reason for family in UNREVIEWED if name in family.flags)
    near = difflib.get_close_matches(name, KNOWN, 1, 0.9)
    meant = f"; did you mean {near[0]}?" if near else ""
    unread = f"its effect on state, communicators and streams has not been reviewed{meant}"
    return next(reasons, unread)


def unread_values(argv: Sequence[str]) -> Iterator[str]:
    """Yield what is given for a flag of :data:`VALUES` and was not read, as ``--flag=value``,
    unless a row speaks of it."""
    flag = ""
    for word in words_of(argv):
        if word.startswith("--"):
            flag = word
        elif word not in VALUES.get(flag, (word,)) and not any(
            row.is_named_in([flag, word]) for row in ROWS
        ):
            yield f"{flag}={word}"


#: whose effect somebody has read
KNOWN = {flag for row in ROWS for flag in row.flags}
KNOWN |= {flag for family in REVIEWED for flag in family.flags}


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
