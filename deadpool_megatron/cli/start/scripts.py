"""The program of a run: a script of Megatron-LM with ``--deadpool`` on its command line becomes its
command, and what all training processes need is imported once, in the process they are forked from.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import sys
import warnings
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron import arguments
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.starter import choose_method
from deadpool_megatron.hookpoints import FLAG
from deadpool_megatron.settings import Settings, flag_name
from deadpool_megatron.support import flags

#: runs the script with the hooks in it
MODULE = "deadpool_megatron.megatron_lm"
PRELOAD = f"{MODULE}.preload"
#: names the script to what is preloaded
VARIABLE = "DEADPOOL_SCRIPT"
DEFAULT_PRELOAD = (
    "deadpool_megatron.platform.preload,deadpool_megatron.trainer.loop,deadpool_megatron.hooks"
)


def member_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return what members run for the command that the user gave; any other is left as it is.

    Raises CommandError for a module: what belongs to the script is found beside its file.
    """
    if FLAG not in command[1:] or script_of(command) is not None:
        return tuple(command)
    if command[0] == "-m":
        raise CommandError(f"{FLAG} is for scripts: give the file of {command[1]} instead of -m")
    return ("-m", MODULE, *command)


def script_of(command: Sequence[str]) -> str | None:
    """The user's script in an answer of :func:`member_command`; None when there is none."""
    return command[2] if tuple(command[:2]) == ("-m", MODULE) and len(command) > 2 else None


def adopt(args: argparse.Namespace) -> None:
    """Have ``args.command`` be what members run, and the settings those that the script's command
    line names.

    Raises CommandError, also for what each process would refuse later.
    """
    command = member_command(args.command)
    if script_of(command) is not None:
        if line := flags.refused_or_unreviewed(args.command):
            raise CommandError(line)
        for name in flags.let_through(args.command):
            print(f"deadpool: {name} is not reviewed, and let through", file=sys.stderr)
        arguments.put_into(args, _settings(args.command[1:], args.options))
    args.command = list(command)


def modules(given: str | None, default: str, command: Sequence[str]) -> tuple[str, ...]:
    """Return what is imported ahead: as ``given``, else what fits the member's command."""
    if given is None:
        given = default if script_of(command) is None else PRELOAD
    return tuple(name for name in given.split(",") if name)


def announce(command: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Name the script to what is preloaded from now on; see :data:`VARIABLE`."""
    script = script_of(command)
    if script is None:
        environment.pop(VARIABLE, None)
    else:
        environment[VARIABLE] = str(Path(script).absolute())


def keep_single_threaded() -> None:
    """To be called before anything may import numpy: its OpenBLAS would start a thread for each
    core at import, and a fork needs there be none.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def preload_modules(settings: Settings, modules: Sequence[str]) -> None:
    """Import what all members need, once, before they are forked.

    Raises CommandError when a module is broken or starts threads. Does nothing for ``exec``.
    """
    if choose_method(settings.start_method) != "fork":
        return
    keep_single_threaded()
    for name in modules:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(name)
        except ImportError as error:
            raise CommandError(f"Python module {name!r} cannot be imported: {error}") from error
        if posix.thread_count() != 1:
            raise CommandError(
                f"importing {name!r} starts threads, a fork is not safe then: use"
                " --deadpool-start-method exec"
            )
    # Shared pages stay shared: the collector would write into each object.
    gc.collect()
    gc.freeze()


def _settings(script_arguments: Sequence[str], own_options: Sequence[str]) -> dict[str, Any]:
    try:
        own, _ = arguments.given_in(own_options, script=False)
        found, others = arguments.given_in(script_arguments, script=True)
    except arguments.BadValueError as error:
        raise CommandError(f"in the script's arguments: {error}") from error
    unknown = next((text for text in others if text.startswith(f"{FLAG}-")), None)
    if unknown is not None:
        raise CommandError(f"the script's {unknown} is unknown: see 'deadpool run --help'")
    for name, value in found.items():
        if own.get(name, value) != value:
            raise CommandError(
                f"{flag_name(name)} is {own[name]} before the '--' and {value} in the script's"
                " arguments: give it once"
            )
    return found
