"""Findings on a command line, and the verdict: items set for the user, allowed by name, or refused.

``deadpool support`` and the start of a run use :func:`judge`. The start uses it twice: with the
command line alone before a process is started, and in each process with the arguments that
Megatron-LM has validated. A flag or value that was not reviewed is refused by its name, unless the
user accepts it.
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
class SupportFinding:
    """An item of a command line that needs a remark. ``shown``: the item as the user writes it;
    ``line``: the remark; ``name``: the name that allows the item; ``allowed``: whether the same
    command line allows it."""

    level: Level
    shown: str
    line: str
    name: str = ""
    allowed: bool = False

    @property
    def is_from_fork(self) -> bool:
        """Return whether no known version of Megatron-LM has the item."""
        return self.level is Level.UNREAD and not flags.is_known(self.shown)


def judge(
    command: Sequence[str], args: argparse.Namespace | None = None, version: str = ""
) -> list[SupportFinding]:
    """Return the findings on a script and its arguments.

    ``args``: the arguments that Megatron-LM has validated; None to judge the command line alone,
    with the defaults of a ``version`` of Megatron-LM (empty: the newest).
    """
    read, unread = (_values_of(flag, command) for flag in (ALLOW, ALLOW_UNREVIEWED))
    argv = command[1:]
    rows = [
        row.as_given(argv) if row.level is Level.ACCEPTED else row
        for row in flags.ROWS
        if (row.is_named_in(argv, version) if args is None else row.applies(args))
    ]
    findings = [
        SupportFinding(
            row.level, row.shown, row.line, row.name, row.level is Level.READ and row.name in read
        )
        for row in rows
    ]
    if args is not None and (line := flags.one_logger_error(args)):
        findings.append(SupportFinding(Level.REFUSED, "one_logger", line))
    for shown in _unread(command):
        name = shown.lstrip("-")
        line = (
            f"{shown} is not reviewed: {flags.unread_reason(shown)}; leave it out, or accept it"
            f" with {ALLOW_UNREVIEWED} {name}"
        )
        findings.append(SupportFinding(Level.UNREAD, shown, line, name, name in unread))
    return findings


def judge_environment(environment: Mapping[str, str]) -> list[SupportFinding]:
    """Return the findings on variables that members with NCCL read."""
    levels = ((Level.SET, table.overridden), (Level.REFUSED, table.refused))
    return [SupportFinding(level, *pair) for level, read in levels for pair in read(environment)]


def verdict(findings: Iterable[SupportFinding]) -> str:
    """Return ``supported``; ``accepted`` if an item was never run; ``allowed`` if an item needs an
    allowance by name; or ``refused``."""
    levels = {finding.level for finding in findings}
    if Level.REFUSED in levels:
        return "refused"
    if not levels <= _ACCEPTED:
        return "allowed"
    return "accepted" if Level.ACCEPTED in levels else "supported"


def never_run(findings: Iterable[SupportFinding]) -> list[str]:
    """Return the items that are accepted and were never run, as the user writes them."""
    return [each.shown for each in findings if each.level is Level.ACCEPTED]


def refusal(findings: Iterable[SupportFinding]) -> str:
    """Return a line on all items that prevent the start of a run; empty if none does."""
    blockers = [each for each in findings if each.level not in _ACCEPTED and not each.allowed]
    if not blockers:
        return ""
    # The first blocker is a refused item, if any: such rows have the best advice.
    first = blockers[0]
    others = [
        f" ({text} as well: {', '.join(names)})"
        for level, text in _BLOCKER_TEXTS.items()
        if (names := [each.shown for each in blockers[1:] if each.level is level])
    ]
    return first.line + "".join(others)


def allowances(findings: Iterable[SupportFinding]) -> list[str]:
    """Return the flags that would allow the items that can be allowed and are not yet."""
    flag = {Level.READ: ALLOW, Level.UNREAD: ALLOW_UNREVIEWED}
    return [
        f"{flag[each.level]} {each.name}"
        for each in findings
        if each.level in flag and not each.allowed
    ]


def notes(findings: Iterable[SupportFinding]) -> list[str]:
    """Return the first lines of a run: items that are set, accepted, or allowed by the user."""
    return [
        each.line
        if each.level in _ACCEPTED
        else f"{each.shown} is {_BLOCKER_TEXTS[each.level]}, and let through"
        for each in findings
        if each.level in _ACCEPTED or each.allowed
    ]


#: levels that need no allowance
_ACCEPTED = {Level.SET, Level.ACCEPTED}
_BLOCKER_TEXTS = {
    Level.REFUSED: "refused",
    Level.READ: "read and never run",
    Level.UNREAD: "not reviewed",
}


def _values_of(flag: str, command: Sequence[str]) -> set[str]:
    pairs = itertools.pairwise(flags.tokens_of(command))
    return {value.lstrip("-") for name, value in pairs if name == flag}


def _unread(command: Sequence[str]) -> list[str]:
    """Return the items that were not reviewed: the script, if it is another of Megatron-LM's,
    flags, and values that a flag has gained since its review."""
    scripts = [
        name
        for name in flags.UNREVIEWED_SCRIPTS
        for each in command[:1]
        if PurePath(each).match(name)
    ]
    tokens = (argument.split("=", 1)[0] for argument in command[1:])
    return [
        *scripts,
        *dict.fromkeys(
            flag
            for flag in tokens
            if flag.startswith("--")
            and flag not in flags.KNOWN
            and not flag.startswith(f"{FLAG}-")
            and flag != FLAG
        ),
        *dict.fromkeys(flags.unread_values(command[1:])),
    ]
