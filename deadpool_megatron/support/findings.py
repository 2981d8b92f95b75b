"""The verdict on a command line: what of it is set for the user, allowed by name, or refused.

``deadpool support`` and the start of a run use :func:`judge`, the start in two places: before
anything runs, with what the command line alone says, and in each process with the arguments that
Megatron-LM has validated. An unread flag or value is refused by its name, unless the user answers
for it.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from deadpool_megatron.hookpoints import ALLOW, ALLOW_UNREVIEWED, FLAG
from deadpool_megatron.support import environment as table, flags
from deadpool_megatron.support.flags import Level


@dataclass(frozen=True)
class Judged:
    """Something on a command line that is not simply supported. ``name``: by which it is allowed;
    ``allowed``: the same command line says so."""

    level: Level
    shown: str
    line: str
    name: str = ""
    allowed: bool = False

    @property
    def is_of_a_fork(self) -> bool:
        """True for what no version of Megatron-LM has that the table knows."""
        return self.level is Level.UNREAD and not flags.is_known(self.shown)


def judge(
    command: Sequence[str], args: argparse.Namespace | None = None, version: str = ""
) -> list[Judged]:
    """Return what is to be said about a script and its arguments.

    ``args``: as Megatron-LM has validated them; None: what can be read off the command line, with
    the defaults of that ``version`` of Megatron-LM (empty: the newest).
    """
    read, unread = (_named_behind(flag, command) for flag in (ALLOW, ALLOW_UNREVIEWED))
    words = command[1:]
    rows = [
        row.as_given(words) if row.level is Level.ACCEPTED else row
        for row in flags.ROWS
        if (row.is_named_in(words, version) if args is None else row.applies(args))
    ]
    found = [
        Judged(
            row.level, row.shown, row.line, row.name, row.level is Level.READ and row.name in read
        )
        for row in rows
    ]
    if args is not None and (line := flags.one_logger_complaint(args)):
        found.append(Judged(Level.REFUSED, "one_logger", line))
    for shown in _unread(command):
        name = shown.lstrip("-")
        line = (
            f"{shown} is not reviewed: {flags.why_unread(shown)}; leave it out, or accept it"
            f" with {ALLOW_UNREVIEWED} {name}"
        )
        found.append(Judged(Level.UNREAD, shown, line, name, name in unread))
    return found


def judge_environment(environment: Mapping[str, str]) -> list[Judged]:
    """Return what is to be said about variables that members read with NCCL."""
    fates = ((Level.SET, table.set_aside), (Level.REFUSED, table.refused))
    return [Judged(level, *found) for level, of in fates for found in of(environment)]


def verdict(findings: Iterable[Judged]) -> str:
    """Return ``supported``, ``accepted`` where something of it was never run, ``allowed`` for what
    needs an allowance by name, or ``refused``."""
    levels = {finding.level for finding in findings}
    if Level.REFUSED in levels:
        return "refused"
    if not levels <= _TAKEN:
        return "allowed"
    return "accepted" if Level.ACCEPTED in levels else "supported"


def never_run(findings: Iterable[Judged]) -> list[str]:
    """Return what is accepted of a command line and was never run, as it is given there."""
    return [each.shown for each in findings if each.level is Level.ACCEPTED]


def refusal(findings: Iterable[Judged]) -> str:
    """Return one line about all that keeps a run from its start; empty if nothing does."""
    stopped = [each for each in findings if each.level not in _TAKEN and not each.allowed]
    if not stopped:
        return ""
    # What is refused comes first: its rows have better advice.
    first = stopped[0]
    others = [
        f" ({word} as well: {', '.join(shown)})"
        for level, word in _STOPPED.items()
        if (shown := [each.shown for each in stopped[1:] if each.level is level])
    ]
    return first.line + "".join(others)


def allowances(findings: Iterable[Judged]) -> list[str]:
    """Return what would have to be added to the command line for all that can be allowed."""
    flag = {Level.READ: ALLOW, Level.UNREAD: ALLOW_UNREVIEWED}
    return [
        f"{flag[each.level]} {each.name}"
        for each in findings
        if each.level in flag and not each.allowed
    ]


def notes(findings: Iterable[Judged]) -> list[str]:
    """Return the first lines of a run: what was set for the user, and what was let through."""
    return [
        each.line
        if each.level in _TAKEN
        else f"{each.shown} is {_STOPPED[each.level]}, and let through"
        for each in findings
        if each.level in _TAKEN or each.allowed
    ]


#: what a run begins with, without a word of the user's
_TAKEN = {Level.SET, Level.ACCEPTED}
_STOPPED = {
    Level.REFUSED: "refused",
    Level.READ: "read and never run",
    Level.UNREAD: "not reviewed",
}


def _named_behind(flag: str, command: Sequence[str]) -> set[str]:
    pairs = itertools.pairwise(flags.words_of(command))
    return {value.lstrip("-") for given, value in pairs if given == flag}


def _unread(command: Sequence[str]) -> list[str]:
    """Return the script, if it is one of Megatron-LM's that was never tried, each flag that nobody
    vouches for, and each value that came to a flag after it was read."""
    scripts = [
        name
        for name in flags.UNREVIEWED_SCRIPTS
        for each in command[:1]
        if PurePath(each).match(name)
    ]
    given = (argument.split("=", 1)[0] for argument in command[1:])
    return [
        *scripts,
        *dict.fromkeys(
            flag
            for flag in given
            if flag.startswith("--")
            and flag not in flags.KNOWN
            and not flag.startswith(f"{FLAG}-")
            and flag != FLAG
        ),
        *dict.fromkeys(flags.unread_values(command[1:])),
    ]
