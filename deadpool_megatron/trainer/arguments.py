"""The trainer's command line: Megatron's flag names, one flag per field of the config.

Nothing here imports torch or Megatron, so that ``--help`` and a bad argument answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

from deadpool_megatron.trainer.config import BadArgumentsError, TrainerConfig, flag_name

__all__ = ["BadArgumentsError", "TrainerConfig", "build_parser", "config_from", "parse_args"]

PROGRAM = "deadpool run [options] -- -m deadpool_megatron.trainer"


class _Parser(argparse.ArgumentParser):
    """Answers a bad argument with one line and exit status 2; reads ``@file`` with comments."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as error:
            self.error(f"{arg_line.strip()}: {error}")


_DESCRIPTION = """\
Pretrains a GPT on text with stock megatron-core. Text is read as bytes; token files are built on
first use. Flags have Megatron's names. @FILE reads flags from a file, with # comments.

  %(prog)s @configs/tiny.args --train-iters 100
  %(prog)s @configs/small.args --data README.md docs --bf16
"""


def build_parser(prog: str = PROGRAM) -> argparse.ArgumentParser:
    """A parser with one flag per field of TrainerConfig; others may add their own flags to it."""
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [@FILE ...] [flags]",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    hints = get_type_hints(TrainerConfig)
    groups: dict[str, argparse._ArgumentGroup] = {}
    for entry in dataclasses.fields(TrainerConfig):
        facts = entry.metadata
        group = groups.get(facts["group"]) or parser.add_argument_group(facts["group"])
        groups[facts["group"]] = group
        help_text = facts["help"].replace("%", "%%")
        if hints[entry.name] is bool:
            group.add_argument(flag_name(entry.name), action="store_true", help=help_text)
            continue
        default = getattr(TrainerConfig, entry.name, None)
        if entry.default_factory is not dataclasses.MISSING:
            default = entry.default_factory()
        shown = "" if default in (None, ()) else f" (default: {default})"
        options = {key: facts[key] for key in ("choices", "nargs") if key in facts}
        group.add_argument(
            flag_name(entry.name),
            type=_value_type(hints[entry.name]),
            default=default,
            metavar=None if "choices" in options else _METAVARS[_value_type(hints[entry.name])],
            help=help_text + shown,
            **options,
        )
    return parser


_METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


def _value_type(hint: Any) -> type:
    """The type of one value of a field annotated T, T | None or tuple[T, ...]."""
    members = [m for m in getattr(hint, "__args__", (hint,)) if m not in (type(None), Ellipsis)]
    value_type: type = members[0]
    return value_type


def config_from(namespace: argparse.Namespace) -> TrainerConfig:
    """The config in parsed arguments. Raises BadArgumentsError with one clear line."""
    values = {f.name: getattr(namespace, f.name) for f in dataclasses.fields(TrainerConfig)}
    return TrainerConfig(**{**values, "data": tuple(values["data"])})


def parse_args(argv: Sequence[str], world_size: int | None = None) -> TrainerConfig:
    """The config for a command line; a bad one is answered with one line and exit status 2.

    ``world_size``: of a protected run; also check that the layout divides it.
    """
    parser = build_parser()
    namespace = parser.parse_args(argv)
    try:
        config = config_from(namespace)
        if world_size is not None:
            config.check_world_size(world_size)
            if config.load is not None:
                raise BadArgumentsError("--load: continue with deadpool run --resume instead")
        return config
    except BadArgumentsError as error:
        parser.error(str(error))
