"""The ``--deadpool-*`` command-line flags, derived from :class:`~.settings.Settings`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from deadpool_megatron import failpoints, settings
from deadpool_megatron.hookpoints import ALLOW, ALLOW_UNREVIEWED, ALLOW_UNTESTED, FLAG

#: the first word of the titles of groups
TITLE = "deadpool"


def add_arguments(
    parser: argparse.ArgumentParser, *, defaults: settings.Settings | None = None
) -> None:
    """Add the switches, and a flag for each setting of users, in groups by topic.

    ``defaults``: settings to use as defaults instead of those of the dataclass.
    """
    group = parser.add_argument_group(TITLE, "fault tolerance; times are in seconds")
    group.add_argument(
        FLAG,
        action="store_true",
        help="protect this training (implied by 'deadpool run' for a script of Megatron-LM in its"
        " checkout); without it the other flags of these groups do nothing (default: off)",
    )
    group.add_argument(
        ALLOW_UNTESTED,
        action="store_true",
        help="accept a version of Megatron-LM that has not been tested (default: off)",
    )
    group.add_argument(
        ALLOW,
        action="append",
        default=[],
        metavar="NAME",
        help="accept a flag of Megatron-LM that was read and tested in parts, never run whole"
        " (the refusal gives NAME); may be given several times (default: none)",
    )
    group.add_argument(
        ALLOW_UNREVIEWED,
        action="append",
        default=[],
        metavar="FLAG",
        help="accept a flag of Megatron-LM that has not been reviewed, named without its dashes,"
        " or a value of one, as FLAG=VALUE; may be given several times (default: none)",
    )
    others = [name.replace("_", "-") for name in settings.FIELDS if not settings.has_flag(name)]
    group.add_argument(
        settings.SET_FLAG,
        action=_Set,
        default=argparse.SUPPRESS,
        metavar="NAME=VALUE",
        help="override a value that is derived from others, or has a common default:"
        f" {', '.join(others)}; may be given several times",
    )
    for name, entry in settings.FIELDS.items():
        if name in _TOPICS:
            group = parser.add_argument_group(f"{TITLE}: {_TOPICS[name]}")
        dest, default = f"{_PREFIX}{name}", entry.default
        if defaults is not None:
            default = getattr(defaults, name)
        parser.set_defaults(**{dest: default})
        if not settings.has_flag(name):
            continue
        nccl, kind = entry.metadata["nccl"], _kind(name)
        text = f"{entry.metadata['default']!r}" + (f", with NCCL {nccl!r}" if nccl else "")
        group.add_argument(
            settings.flag_name(name),
            *_ALIASES.get(name, ()),
            dest=dest,
            type=kind,
            metavar=_UNITS.get(name.rsplit("_", 1)[-1], _METAVARS[kind]),
            help=f"{entry.metadata['help']} (default: {text})".replace("%", "%%"),
        )


def advice_for_old(flag: str) -> str:
    """Return advice for a flag of version 0.5 or 0.6 that was renamed or removed; empty for any
    other flag."""
    name = flag.partition("=")[0].removeprefix("--deadpool-").replace("-", "_")
    if name in _RENAMED:
        return f"give {settings.flag_name(_RENAMED[name])}"
    if name in _REMOVED or name.startswith("tls_"):
        return "it was removed in version 0.6, leave it out"
    return f"give {settings.flag_name(name)}=VALUE" if name in settings.FIELDS else ""


class _Set(argparse.Action):
    """Action of :data:`.settings.SET_FLAG`, which sets a value without a flag of its own."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        key, _, text = str(values).partition("=")
        name = key.replace("-", "_")
        if name not in settings.FIELDS or settings.has_flag(name):
            raise argparse.ArgumentError(self, f"there is no {key!r}, see --help-all")
        try:
            setattr(namespace, f"{_PREFIX}{name}", _kind(name)(text))
        except ValueError as error:
            problem = f"invalid value of {key}: {text!r}"
            raise argparse.ArgumentError(self, problem) from error


def _kind(name: str) -> type[Any]:
    """Return the type that converts the text of a setting to its value."""
    return type(settings.FIELDS[name].metadata["default"])


def communicator_in(namespace: argparse.Namespace) -> str:
    """Return the communication library in parsed arguments."""
    return str(getattr(namespace, f"{_PREFIX}communicator"))


def stand_in_problem(communicator: str) -> str:
    """Return the reason, in a line, why this process cannot use a communication library; empty if
    it can. A stand-in for a library, as in tests, needs a fault plan."""
    if not settings.is_stand_in(communicator) or failpoints.is_planned():
        return ""
    return (
        f"--deadpool-communicator {communicator}: a module is accepted only with a fault plan"
        f" ({failpoints.ENVIRONMENT_NAME}); give auto, gloo or nccl"
    )


def settings_from(namespace: argparse.Namespace, *, communicator: str = "") -> settings.Settings:
    """Return the settings in parsed arguments. ``communicator``: the communication library that was
    chosen, if any, as NCCL has other defaults. Raises SettingsError.
    """
    pairs = {name: getattr(namespace, f"{_PREFIX}{name}") for name in settings.FIELDS}
    values = {name: value for name, value in pairs.items() if value is not None}
    if problem := stand_in_problem(communicator_in(namespace)):
        raise settings.SettingsError(problem)
    if communicator:
        values["communicator"] = communicator
    return settings.Settings(**values)


def switches_in(namespace: argparse.Namespace) -> list[str]:
    """Return the switches in parsed arguments, as words for the command line of a script."""
    tokens = []
    for flag in (FLAG, ALLOW_UNTESTED, ALLOW, ALLOW_UNREVIEWED):
        value = getattr(namespace, flag.removeprefix("--").replace("-", "_"), None)
        if value is True:
            tokens.append(flag)
        for name in value or () if value is not True else ():
            tokens += [flag, name]
    return tokens


def put_into(namespace: argparse.Namespace, values: Mapping[str, Any]) -> None:
    """Replace settings in parsed arguments. ``values``: by the names in the dataclass."""
    for name, value in values.items():
        setattr(namespace, f"{_PREFIX}{name}", value)


def settings_in(arguments: Sequence[str], *, script: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the settings that a command line contains, by field name, and its other words.

    ``script``: the command line is that of a script of Megatron-LM, which accepts no abbreviations.
    Raises argparse.ArgumentError for a flag without its value, or with a value of the wrong type.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=not script, exit_on_error=False)
    add_arguments(parser)
    # A parser fills in defaults only for names that do not exist yet.
    empty = argparse.Namespace(**{f"{_PREFIX}{name}": None for name in settings.FIELDS})
    parsed, others = parser.parse_known_args(list(arguments), empty)
    values = {name: getattr(parsed, f"{_PREFIX}{name}") for name in settings.FIELDS}
    return {name: value for name, value in values.items() if value is not None}, others


_PREFIX = "deadpool_"
_RENAMED = {"bad_node_command": "on_event", "replicas": "copies"}
_REMOVED = ("journal", "numa", "share_snapshots", "vault_cpus")
# First setting of a topic -> title of the topic; the fields of a topic follow each other.
_TOPICS = {
    "copies": "protection of the state",
    "shm_gb": "nodes",
    "notify": "messages",
    "domains_file": "network",
    "node_silence_seconds": "limits of time",
    "audit_interval": "wrong numbers, slow nodes",
    "persist_interval": "checkpoints in the background",
}
_METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}
_UNITS = {"seconds": "SECONDS", "bytes": "BYTES", "gbps": "GBPS", "gb": "GB"}
_ALIASES = {
    "domains_file": ("--deadpool-domains",),
    "spare_timeout_seconds": ("--deadpool-spare-timeout",),
}
