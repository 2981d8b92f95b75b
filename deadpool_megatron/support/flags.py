"""The table of Megatron-LM's flags, and the rows that apply to a command line or to arguments.

Each flag of core_v0.16.1, and each reviewed flag of later versions, is in exactly a single place of
``tables/flags.toml``; all other flags count as unread.

The arguments that Megatron has parsed decide whether a row applies (:meth:`FlagRow.applies`). A row
that the command line alone shows (:meth:`FlagRow.is_named_in`) is reported before a process is
started. :mod:`.findings` derives the verdict.
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
    """The degree to which protection supports a flag or value."""

    RUN = "run"
    SET = "set"
    ACCEPTED = "accepted"
    READ = "read"
    UNREAD = "unread"
    REFUSED = "refused"


@dataclass(frozen=True)
class FlagRow:
    """A row: flags that are refused, accepted by name, or set to another value.

    ``shown``: the flags of the row, as a user writes them. ``when``: conditions on the arguments,
    of which a single one suffices; if empty, the row applies if any of its flags is set.
    ``only_with``: the package, or newer Megatron-LM, whose parser knows the flags; empty for
    0.16.1. ``to``: the new value by argument; an empty text means None.
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
        """The name that allows the row with :data:`ALLOW`: that of its first flag, or
        ``flag=value``."""
        tokens = self.shown.split(", ")[0].removeprefix("--").split()
        return "=".join(tokens) if len(tokens) == 2 else tokens[0]

    @property
    def line(self) -> str:
        """The line for the user."""
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
        """A text on the values that the row sets."""
        texts = [f"--{name.replace('_', '-')} {value}" for name, value in self.to.items() if value]
        return f"becomes {', '.join(texts)}" if texts else "is removed"

    def applies(self, args: argparse.Namespace) -> bool:
        """Return whether the row applies to these arguments."""
        conditions = self.when or [flag[2:].replace("-", "_") for flag in self.flags]
        return any(
            all(_holds(term, args) for term in condition.split(" and ")) for condition in conditions
        )

    def is_named_in(self, argv: Sequence[str], version: str = "") -> bool:
        """Return whether the command line alone shows that the row applies, with the defaults of
        ``version`` of Megatron-LM (empty: the newest)."""
        # An argument may have another name than its flag; for simple rows the flag suffices.
        has_flag = not set(tokens_of(argv)).isdisjoint(self.shown.split(", "))
        is_compound = any(" and " in condition for condition in self.when)
        return (has_flag and not is_compound) or self.applies(named_arguments(argv, version))

    def as_given(self, argv: Sequence[str]) -> FlagRow:
        """Return the row reduced to the flags that ``argv`` has, or unchanged if it has none."""
        names = ", ".join(flag for flag in self.flags if flag in tokens_of(argv))
        return replace(self, shown=names) if names else self

    def set_in(self, args: argparse.Namespace) -> None:
        """Set the row's values in ``args``."""
        for name, value in self.to.items():
            setattr(args, name, None if value == "" else value)


@dataclass(frozen=True)
class FlagFamily:
    """Flags with the same judgement. ``reason``: why they are accepted, or why they were not
    reviewed; ``names``: the flags without dashes, separated by blanks.
    """

    title: str
    reason: str
    names: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags with dashes, as a user writes them."""
        return tuple(f"--{name}" for name in self.names.split())


def _row(level: Level, row: dict[str, Any]) -> FlagRow:
    when = row.get("when", ())
    reason = row["reason"].format_map(_TABLES["shared"])
    return FlagRow(
        level, **{**row, "reason": reason, "when": (when,) if isinstance(when, str) else when}
    )


def _rows(level: Level) -> tuple[FlagRow, ...]:
    return tuple(_row(level, row) for row in _TABLES[level])


#: all rows of each level, in the order in which they are checked
REFUSED, READ, SET, ACCEPTED = map(_rows, (Level.REFUSED, Level.READ, Level.SET, Level.ACCEPTED))
ROWS = (*REFUSED, *READ, *SET, *ACCEPTED)
#: arguments with which a run cannot have another number of model replicas
INELASTIC = tuple(_row(Level.REFUSED, row) for row in _TABLES["inelastic"])
REVIEWED = tuple(FlagFamily(**row) for row in _TABLES["reviewed"])
UNREVIEWED = tuple(FlagFamily(**row) for row in _TABLES["unreviewed"])
#: scripts of Megatron-LM that were never run under protection
UNREVIEWED_SCRIPTS: tuple[str, ...] = tuple(_TABLES["scripts"])
#: the reviewed values of the flags whose values Megatron-LM's parser lists
VALUES: dict[str, tuple[str, ...]] = {
    flag: tuple(values.split()) for flag, values in _TABLES["values"].items()
}
#: defaults to which a row applies, by the first version (MAJOR.MINOR) that has them
DEFAULTS: dict[str, dict[str, Any]] = _TABLES["defaults"]


def one_logger_error(args: argparse.Namespace) -> str:
    """Return a line if Megatron-LM would open one_logger, else an empty text.

    If the package is installed, Megatron opens it in each pass, also in a spare's.
    """
    if not getattr(args, "enable_one_logger", False) or not is_installed("one_logger"):
        return ""
    return (
        "one_logger cannot be protected: each process of a spare would open it as the last rank;"
        " give --no-one-logger"
    )


def _holds(term: str, args: argparse.Namespace) -> bool:
    """Return whether arguments meet a term: ``NAME``, which is met by a non-empty value, or ``NAME
    TEST VALUES``. An argument that the version does not have counts as not set."""
    name, _, rest = term.partition(" ")
    test, _, text = rest.partition(" ")
    value = getattr(args, name, None)
    value = getattr(value, "name", value)  # a member of an enumeration, as users write it
    match test:
        case "":
            return bool(value)
        case "unknown":
            return not hasattr(args, name)
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


def tokens_of(argv: Iterable[str]) -> list[str]:
    """Return the tokens of a command line, with ``--flag=value`` split into ``--flag`` and
    ``value``."""
    return [
        word
        for argument in argv
        for word in (argument.split("=", 1) if argument.startswith("--") else (argument,))
    ]


def named_arguments(argv: Sequence[str], version: str = "") -> argparse.Namespace:
    """Return the arguments that a command line shows without a parser: each flag with the token
    after it, or True, and the defaults of ``version`` (empty: the newest) that a row tests."""
    tokens = tokens_of(argv)
    values: dict[str, Any] = {}
    for since, defaults in DEFAULTS.items():
        if not version or _number(version) >= _number(since):
            values |= defaults
    for flag, value in itertools.zip_longest(tokens, tokens[1:], fillvalue="--"):
        if flag.startswith("--"):
            values[flag.removeprefix("--").replace("-", "_")] = value.startswith("--") or (
                int(value) if value.isdigit() else value
            )
    return argparse.Namespace(**values)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def is_known(name: str) -> bool:
    """Return whether any version of Megatron-LM has this flag or script."""
    return name in UNREVIEWED_SCRIPTS or any(name in family.flags for family in UNREVIEWED)


def unread_reason(name: str) -> str:
    """Return the reason why a flag, a value or a script counts as not reviewed."""
    if not name.startswith("--"):
        return "only pretrain_gpt.py was ever run under protection"
    reasons = (family.reason for family in UNREVIEWED if name in family.flags)
    matches = difflib.get_close_matches(name, KNOWN, 1, 0.9)
    hint = f"; did you mean {matches[0]}?" if matches else ""
    default = f"its effect on state, communicators and streams has not been reviewed{hint}"
    return next(reasons, default)


def unread_values(argv: Sequence[str]) -> Iterator[str]:
    """Yield the values of flags in :data:`VALUES` that were not reviewed and have no row, as
    ``--flag=value``."""
    flag = ""
    for word in tokens_of(argv):
        if word.startswith("--"):
            flag = word
        elif word not in VALUES.get(flag, (word,)) and not any(
            row.is_named_in([flag, word]) for row in ROWS
        ):
            yield f"{flag}={word}"


#: flags whose effect was reviewed
KNOWN = {flag for row in ROWS for flag in row.flags}
KNOWN |= {flag for family in REVIEWED for flag in family.flags}


def is_installed(package: str) -> bool:
    """Return whether Python finds a package, which may be a part of another package."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the package of which it is a part is not installed
        return False
