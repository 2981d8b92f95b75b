"""The ``--deadpool-*`` command-line flags, derived from :class:`~.settings.Settings`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from deadpool_megatron import failpoints
from deadpool_megatron.hookpoints import ALLOW_UNREVIEWED, ALLOW_UNTESTED, FLAG
from deadpool_megatron.settings import NCCL_DEFAULTS, Settings, SettingsError, flag_name, is_played


def add_arguments(
    parser: argparse.ArgumentParser, *, switches: bool = False, defaults: Settings | None = None
) -> None:
    """Add one flag per setting, in one group.

    ``switches``: the three of Megatron-LM's own command line as well. ``defaults``: other ones than
    those of the dataclass.
    """
    group = parser.add_argument_group("deadpool", "fault tolerance; times are in seconds")
    if switches:
        group.add_argument(
            FLAG,
            action="store_true",
            help="protect this training: it goes on when nodes die (start it with 'deadpool run');"
            " without it the other flags of this group do nothing (default: off)",
        )
        group.add_argument(
            ALLOW_UNTESTED,
            action="store_true",
            help="go on with a version of Megatron-LM that was never tried (default: off)",
        )
        group.add_argument(
            ALLOW_UNREVIEWED,
            action="append",
            default=[],
            metavar="FLAG",
            help="let a flag of Megatron-LM through, named without its dashes, of which nobody has"
            " said that a recovery gets over it, or a value of one, as FLAG=VALUE; may be given"
            " several times (default: none)",
        )
    for entry in dataclasses.fields(Settings):
        default = entry.default if defaults is None else getattr(defaults, entry.name)
        kind, shown = type(default), repr(default)
        if defaults is None and entry.name in NCCL_DEFAULTS:
            default, shown = None, f"{default!r}, with NCCL {NCCL_DEFAULTS[entry.name]!r}"
        group.add_argument(
            flag_name(entry.name),
            *_ALIASES.get(entry.name, ()),
            dest=f"{_PREFIX}{entry.name}",
            type=kind,
            default=default,
            metavar=_UNITS.get(entry.name.rsplit("_", 1)[-1], _METAVARS[kind]),
            help=f"{entry.metadata['help']} (default: {shown})".replace("%", "%%"),
        )


def communicator_in(namespace: argparse.Namespace) -> str:
    """The communication library that parsed arguments name."""
    return str(getattr(namespace, f"{_PREFIX}communicator"))


def played_problem(communicator: str) -> str:
    """One line on why this process cannot have these communicators; empty unless they are played,
    as in tests."""
    if not is_played(communicator) or failpoints.is_planned():
        return ""
    return (
        f"--deadpool-communicator {communicator}: a module is taken under a fault plan only"
        f" ({failpoints.ENVIRONMENT_NAME}); give auto, gloo or nccl"
    )


def settings_from(namespace: argparse.Namespace, *, communicator: str = "") -> Settings:
    """The settings in parsed arguments; ``communicator``: what was decided about it, if anything,
    as NCCL has other defaults. Raises SettingsError with one clear line.
    """
    names = [entry.name for entry in dataclasses.fields(Settings)]
    values = {name: getattr(namespace, f"{_PREFIX}{name}") for name in names}
    given = {name: value for name, value in values.items() if value is not None}
    if problem := played_problem(communicator_in(namespace)):
        raise SettingsError(problem)
    if communicator:
        given["communicator"] = communicator
    return Settings(**{**(NCCL_DEFAULTS if communicator == "nccl" else {}), **given})


def put_into(namespace: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Replace settings, named as in the dataclass, in parsed arguments."""
    for name, value in values.items():
        setattr(namespace, f"{_PREFIX}{name}", value)


def given_in(arguments: Sequence[str], *, script: bool) -> tuple[dict[str, Any], list[str]]:
    """The settings that a command line really names, by field name, and what else is in it.

    ``script``: it is that of a script of Megatron-LM, which has the switches and takes no
    abbreviations. Raises BadValueError.
    """
    parser = _Parser(add_help=False, allow_abbrev=not script)
    add_arguments(parser, switches=script)
    # A parser fills in the defaults of names only that are not there.
    names = [entry.name for entry in dataclasses.fields(Settings)]
    empty = argparse.Namespace(**{f"{_PREFIX}{name}": None for name in names})
    found, others = parser.parse_known_args(list(arguments), empty)
    values = {name: getattr(found, f"{_PREFIX}{name}") for name in names}
    return {name: value for name, value in values.items() if value is not None}, others


class BadValueError(ValueError):
    """A flag without its value, or with one of the wrong type; one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BadValueError(message)


_PREFIX = "deadpool_"
_METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}
_UNITS = {"seconds": "SECONDS", "bytes": "BYTES", "gbps": "GBPS", "gb": "GB"}
_ALIASES = {
    "domains_file": ("--deadpool-domains",),
    "spare_timeout_seconds": ("--deadpool-spare-timeout",),
}
