"""The ``--deadpool-*`` command-line flags, derived from :class:`~.settings.Settings`."""

from __future__ import annotations

import argparse
import dataclasses

from deadpool_megatron.settings import Settings, flag_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting, in one group; defaults come from the dataclass."""
    group = parser.add_argument_group("deadpool", "fault tolerance; times are in seconds")
    for entry in dataclasses.fields(Settings):
        default = entry.default
        group.add_argument(
            flag_name(entry.name),
            *_ALIASES.get(entry.name, ()),
            dest=f"deadpool_{entry.name}",
            type=type(default),
            default=default,
            metavar=_METAVARS.get(type(default), "TEXT"),
            help=f"{entry.metadata['help']} (default: {default!r})".replace("%", "%%"),
        )


def settings_from(namespace: argparse.Namespace) -> Settings:
    """The settings in parsed arguments. Raises SettingsError with one clear line."""
    return Settings(
        **{f.name: getattr(namespace, f"deadpool_{f.name}") for f in dataclasses.fields(Settings)}
    )


_METAVARS: dict[type, str] = {int: "N", float: "SECONDS", str: "TEXT"}
_ALIASES = {
    "domains_file": ("--deadpool-domains",),
    "spare_timeout_seconds": ("--deadpool-spare-timeout",),
}
