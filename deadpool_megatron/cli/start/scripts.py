"""The program of a run: the command of its members, also for a script of Megatron-LM, and the
modules to preload, which the server that forks the members imports once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from deadpool_megatron import arguments
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.process.fork_server import BrokenImport, ForkServer, StartError
from deadpool_megatron.hookpoints import FLAG, SCRIPT_VARIABLE
from deadpool_megatron.settings import Settings, flag_name
from deadpool_megatron.support import environment as nccl_environment, findings, flags, versions
from deadpool_megatron.trainer.config import build_parser

#: the module that runs the user's script with the hooks
MODULE = "deadpool_megatron.megatron_lm"
PRELOAD = f"{MODULE}.preload"
EMBEDDED_TRAINER = ("-m", "deadpool_megatron.trainer")
NVIDIA_CONTROL_DEVICE = Path("/dev/nvidiactl")


_FRAMEWORK = (
    ("trainer.megatron_api", "trainer.gpt_loop")
    if flags.is_installed("megatron.core")
    else ("torch_native",)
)
DEFAULT_PRELOAD = ",".join(f"deadpool_megatron.{name}" for name in (*_FRAMEWORK, "member"))


def member_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command of members. A script with ``--deadpool`` runs with the hooks; any other
    command is unchanged.

    Raises CommandError for a module with the flag, as the script's path locates Megatron-LM.
    """
    if FLAG not in command[1:] or script_of(command) is not None:
        return tuple(command)
    if command[0] == "-m":
        raise CommandError(f"{FLAG} is for scripts: give the file of {command[1]} instead of -m")
    return ("-m", MODULE, *command)


def script_of(command: Sequence[str]) -> str | None:
    """Return the user's script in a result of :func:`member_command`; None if there is none."""
    return command[2] if tuple(command[:2]) == ("-m", MODULE) and len(command) > 2 else None


def requested_command(args: argparse.Namespace) -> list[str]:
    """Return the user's command with all switches. A script of Megatron-LM in its checkout gets the
    switch --deadpool if the user did not give it."""
    switches, script = arguments.switches_in(args), "".join(args.command[:1])
    if FLAG not in (*args.command, *switches) and _is_megatron_script(script):
        switches = [FLAG, *switches]
    return [*args.command, *switches]


def adopt(args: argparse.Namespace) -> tuple[str, ...]:
    """Set ``args.command`` to the members' command, and put the settings among the script's
    arguments into ``args``. Return the user's command with all switches.

    Raises CommandError, also for errors that each process would otherwise report later.
    """
    args.command = requested_command(args)
    command, lines = member_command(args.command), list[str]()
    if script_of(command) is not None:
        version = versions.tree_version(versions.tree_of(Path(args.command[0])))
        judgement = findings.judge(args.command, version=version)
        if line := findings.refusal(judgement):
            raise CommandError(line)
        lines = findings.notes(judgement)
        arguments.put_into(args, _settings(args.command[1:], args.options))
    if nccl_environment.is_needed(getattr(args, "deadpool_communicator", "auto")):
        lines += [line for _, line in nccl_environment.overridden(os.environ)]
    for line in lines:
        print(f"deadpool: {line}", file=sys.stderr)
    user_command, args.command = tuple(args.command), list(expanded(command))
    return user_command


def expanded(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command of the embedded trainer with its argument files expanded, as the files may
    be edited during the run. Return any other command unchanged."""
    with contextlib.suppress(UnicodeDecodeError):  # the trainer reports the error
        if tuple(command[:2]) == EMBEDDED_TRAINER:
            return *command[:2], *build_parser()._read_args_from_files([*command[2:]])
    return tuple(command)


def modules(names: str | None, default: str, command: Sequence[str]) -> tuple[str, ...]:
    """Return the modules to preload: those in ``names``, which commas separate, else those for the
    members' command."""
    if names is None:
        names = default if script_of(command) is None else PRELOAD
    return tuple(name for name in names.split(",") if name)


def announce(command: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set the variable that names the script, or remove it. Processes that inherit ``environment``
    from now on preload the script."""
    environment.pop(SCRIPT_VARIABLE, None)
    if script := script_of(command):
        environment[SCRIPT_VARIABLE] = str(Path(script).absolute())


def waits_for_forks(method: str) -> bool:
    """Return whether the start waits until members can be forked. For the method ``auto`` it waits
    only on a host without an NVIDIA driver."""
    return method == "fork" or (method == "auto" and not NVIDIA_CONTROL_DEVICE.exists())


def preload_modules(settings: Settings, modules: Sequence[str]) -> ForkServer | None:
    """Start a server that imports the modules once and forks members. Return None if members are
    not forked.

    On a host with an NVIDIA driver the imports probably use the driver, and the server cannot fork
    then. So the start does not wait for the server there, and members are parked processes unless
    the server reports that it can fork. Raises CommandError for a broken module.
    """
    method = settings.start_method
    if method == "exec":
        return None
    try:
        server = ForkServer.begin(modules)
        return server.ready() if waits_for_forks(method) else server
    except StartError as error:
        if isinstance(error, BrokenImport):
            raise CommandError(str(error)) from error
        if method == "fork":
            raise CommandError(f"{error}: use --deadpool-set start-method=exec") from error
        return None


def _is_megatron_script(script: str) -> bool:
    """Return whether a file calls pretrain() and lies at the root of a checkout of Megatron-LM."""
    path = Path(script)
    is_in_checkout = path.is_file() and (path.parent / "megatron" / "training").is_dir()
    return is_in_checkout and "pretrain(" in path.read_text(errors="replace")


def _settings(script_arguments: Sequence[str], options: Sequence[str]) -> dict[str, Any]:
    """Return the settings among the script's arguments. Raises CommandError if any is unknown or
    contradicts the ``options`` of ``deadpool``."""
    try:
        own, _ = arguments.settings_in(options, script=False)
        settings, others = arguments.settings_in(script_arguments, script=True)
    except argparse.ArgumentError as error:
        raise CommandError(f"in the script's arguments: {error}") from error
    unknown = next((text for text in others if text.startswith(f"{FLAG}-")), None)
    if unknown is not None:
        hint = arguments.advice_for_old(unknown) or "see 'deadpool run --help'"
        raise CommandError(f"the script's {unknown} is unknown: {hint}")
    for name, value in settings.items():
        if own.get(name, value) != value:
            raise CommandError(
                f"{flag_name(name)} is {own[name]} before the '--' and {value} in the script's"
                " arguments: give it once"
            )
    return settings
