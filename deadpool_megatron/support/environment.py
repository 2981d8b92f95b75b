"""Variables that NCCL, torch and Megatron read from a member's environment: name, value, why.

A recovery aborts the communicators of a process that continues, and makes new ones in it. What
torch does by default on an error of NCCL is the opposite: it ends the process. Each value of
``tables/environment.toml`` is the one under which a survivor survives. An agent gives them to
whatever it starts, before torch is imported there; a value that the user has set is looked at when
a member joins.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class Otherwise(Enum):
    """The fate of another value that the user has set."""

    REFUSED = "refused"
    SET_ASIDE = "ignored, with a line"
    WARNED = "taken, with a warning"
    KEPT = "taken"


@dataclass(frozen=True)
class Variable:
    """One row. ``reason``: why members have ``value``, or what another one does; ``as_good``:
    values that do the same; ``former_name``: under which torch reads it, too; ``contrary``: where
    there are any, all values but these do the same.
    """

    name: str
    value: str
    reason: str
    as_good: tuple[str, ...] = ()
    former_name: str = ""
    otherwise: Otherwise = Otherwise.REFUSED
    contrary: tuple[str, ...] = ()

    def is_contrary(self, given: str) -> bool:
        """Return whether a recovery, or the search for who hangs, cannot have the value
        ``given``."""
        if self.contrary:
            return given.lower() in self.contrary
        return given.lower() not in {self.value.lower(), *self.as_good}

    def other_value(self, environment: Mapping[str, str]) -> str:
        """Return what the user has set instead, as ``NAME=value``; empty if nothing."""
        for name in (self.name, self.former_name):
            given = environment.get(name)
            if given is not None and self.is_contrary(given):
                return f"{name}={given}"
        return ""


@dataclass(frozen=True)
class RefusedVersions:
    """Versions of NCCL from ``first`` to ``last``, both included."""

    shown: str
    first: tuple[int, int, int]
    last: tuple[int, int, int]
    reason: str


_TABLES: dict[str, Any] = tomllib.loads(
    (Path(__file__).parent / "tables" / "environment.toml").read_text()
)


def _variable(row: dict[str, Any]) -> Variable:
    row = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}
    return Variable(**{**row, "otherwise": Otherwise[row.get("otherwise", "REFUSED")]})


VARIABLES: tuple[Variable, ...] = tuple(map(_variable, _TABLES["variables"]))
REFUSED_VERSIONS: tuple[RefusedVersions, ...] = tuple(
    RefusedVersions(row["shown"], tuple(row["first"]), tuple(row["last"]), row["reason"])
    for row in _TABLES["nccl"]
)


def is_needed(communicator: str) -> bool:
    """Return whether members need these values with this value of ``--deadpool-communicator``: what
    plays NCCL reads some of them, too."""
    return communicator != "gloo"


def complete(environment: MutableMapping[str, str]) -> None:
    """Set what is not set; what the user has set stays, but for values that are set aside."""
    for variable in VARIABLES:
        if variable.otherwise is Otherwise.SET_ASIDE and variable.other_value(environment):
            environment.pop(variable.former_name, None)
            environment[variable.name] = variable.value
        # The name of today wins over the former one, which is as much the user's.
        if variable.former_name not in environment:
            environment.setdefault(variable.name, variable.value)


def complaint(environment: Mapping[str, str]) -> str:
    """Return one line about the values that a recovery cannot have; empty without one. By now an
    agent has set aside what is set aside."""
    found = refused(environment, Otherwise.REFUSED, Otherwise.SET_ASIDE)
    more = ", ".join(other for other, _ in found[1:])
    return (found[0][1] if found else "") + (f" (refused as well: {more})" if more else "")


def refused(environment: Mapping[str, str], *fates: Otherwise) -> list[tuple[str, str]]:
    """Return the values that a recovery cannot have, and a line about each."""
    return [
        (
            other,
            f"{other} cannot be protected with NCCL: {variable.reason}; unset it, or set it to"
            f" {variable.value}",
        )
        for variable, other in _other_values(environment, *fates or (Otherwise.REFUSED,))
    ]


def set_aside(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the values in whose place members get another, and a line about each."""
    return [
        (other, f"{other} is ignored, members get {variable.value}: {variable.reason}")
        for variable, other in _other_values(environment, Otherwise.SET_ASIDE)
    ]


def warnings(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each value that is taken although it may cost a recovery."""
    return [
        f"{other} is taken as set, and recoveries may fail with it: {variable.reason}"
        for variable, other in _other_values(environment, Otherwise.WARNED)
    ]


def in_force(environment: Mapping[str, str]) -> str:
    """Return all variables of the table with their values here, for a log."""
    return " ".join(
        f"{variable.name}={environment[variable.name]}"
        for variable in VARIABLES
        if variable.name in environment
    )


def version_complaint(version: tuple[int, int, int]) -> str:
    """Return one line about a version of NCCL that cannot be recovered with; empty if it can."""
    for refused in REFUSED_VERSIONS:
        if refused.first <= version <= refused.last:
            found = ".".join(map(str, version))
            return (
                f"NCCL {found} cannot be protected: with NCCL {refused.shown} {refused.reason};"
                " use a torch that brings another one, 2.28.9 for example"
            )
    return ""


def _other_values(environment: Mapping[str, str], *fates: Otherwise) -> list[tuple[Variable, str]]:
    found = ((variable, variable.other_value(environment)) for variable in VARIABLES)
    return [(variable, other) for variable, other in found if other and variable.otherwise in fates]
