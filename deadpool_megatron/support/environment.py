"""Variables that NCCL, torch and Megatron read from a member's environment: name, value, reason.

A recovery aborts the communicators of a process that continues, and creates others in it. By
default, however, torch ends the process on an error of NCCL. With the values of
``tables/environment.toml`` the process continues. An agent sets them for each process that it
starts, before torch is imported there. A user's own value is checked when a member joins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Policy(Enum):
    """The treatment of a value that the user has set and that conflicts with the table."""

    REFUSED = "refused"
    OVERRIDDEN = "ignored, with a line"
    WARNED = "taken, with a warning"
    KEPT = "taken"


@dataclass(frozen=True)
class Variable:
    """A row. ``reason``: why members have ``value``, or the effect of a different value.
    ``equivalent``: values with the same effect. ``former_name``: an older name that torch still
    reads. ``conflicting``: the values that conflict; if empty, all other values do.
    """

    name: str
    value: str
    reason: str
    equivalent: tuple[str, ...] = ()
    former_name: str = ""
    policy: Policy = Policy.REFUSED
    conflicting: tuple[str, ...] = ()

    def conflicts(self, user_value: str) -> bool:
        """Return whether recoveries, or the diagnosis of a hang, fail with a user's value."""
        if self.conflicting:
            return user_value.lower() in self.conflicting
        return user_value.lower() not in {self.value.lower(), *self.equivalent}

    def other_value(self, environment: Mapping[str, str]) -> str:
        """Return a conflicting value that the user has set, as ``NAME=value``; empty if none."""
        for name in (self.name, self.former_name):
            user_value = environment.get(name)
            if user_value is not None and self.conflicts(user_value):
                return f"{name}={user_value}"
        return ""


@dataclass(frozen=True)
class RefusedVersions:
    """Versions of NCCL that are refused, from ``first`` to ``last``, both included. ``shown``: the
    versions as text."""

    shown: str
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    reason: str


_TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "tables" / "environment.toml").read_text()
)


def _variable(row: dict[str, Any]) -> Variable:
    row = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Variable(**{**row, "policy": Policy[row.get("policy", "REFUSED")]})


VARIABLES: tuple[Variable, ...] = tuple(map(_variable, _TABLES["variables"]))
REFUSED_VERSIONS: tuple[RefusedVersions, ...] = tuple(
    RefusedVersions(row["shown"], tuple(row["first"]), tuple(row["last"]), row["reason"])
    for row in _TABLES["nccl"]
)


def is_needed(communicator: str) -> bool:
    """Return whether members need these variables with a value of ``--deadpool-communicator``.
    Stand-ins for NCCL read some variables, too."""
    return communicator != "gloo"


def complete(environment: MutableMapping[str, str]) -> None:
    """Set the missing variables, and replace the user's values that are overridden."""
    for variable in VARIABLES:
        if variable.policy is Policy.OVERRIDDEN and variable.other_value(environment):
            environment.pop(variable.former_name, None)
            environment[variable.name] = variable.value
        # The present name takes precedence over the former name, which the user may have set.
        if variable.former_name not in environment:
            environment.setdefault(variable.name, variable.value)


def error_message(environment: Mapping[str, str]) -> str:
    """Return a line on the values with which recoveries fail; empty if there are none. The agent
    has replaced overridden values, so a remaining value of this kind was set later."""
    pairs = refused(environment, Policy.REFUSED, Policy.OVERRIDDEN)
    more = ", ".join(value for value, _ in pairs[1:])
    return (pairs[0][1] if pairs else "") + (f" (refused as well: {more})" if more else "")


def refused(environment: Mapping[str, str], *policies: Policy) -> list[tuple[str, str]]:
    """Return the values with which recoveries fail, and a line about each."""
    text = "{0} cannot be protected with NCCL: {1.reason}; unset it, or set it to {1.value}"
    return _lines(environment, text, *policies or (Policy.REFUSED,))


def overridden(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the values that are replaced for members, and a line about each."""
    text = "{0} is ignored, members get {1.value}: {1.reason}"
    return _lines(environment, text, Policy.OVERRIDDEN)


def warnings(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each value that is kept although recoveries may fail with it."""
    text = "{0} is taken as set, and recoveries may fail with it: {1.reason}"
    return [line for _, line in _lines(environment, text, Policy.WARNED)]


def in_effect(environment: Mapping[str, str]) -> str:
    """Return the variables of the table that are set, with their values, for a log."""
    return " ".join(
        f"{variable.name}={environment[variable.name]}"
        for variable in VARIABLES
        if variable.name in environment
    )


def version_error(version: tuple[int, int, int]) -> str:
    """Return a line on a version of NCCL with which recoveries fail; empty if they work."""
    for row in REFUSED_VERSIONS:
        if row.first <= version <= row.last:
            text = ".".join(map(str, version))
            return (
                f"NCCL {text} cannot be protected: with NCCL {row.shown} {row.reason};"
                " use a torch that brings another one, 2.28.9 for example"
            )
    return ""


def _lines(environment: Mapping[str, str], text: str, *policies: Policy) -> list[tuple[str, str]]:
    """Return the conflicting values with these policies, each with its line. ``text``: the format
    of a line, with 0 for the value and 1 for the row."""
    pairs = [(row.other_value(environment), row) for row in VARIABLES if row.policy in policies]
    return [(value, text.format(value, row)) for value, row in pairs if value]
