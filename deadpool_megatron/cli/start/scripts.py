"""The program of a run: the command of its members, also for a script of Megatron-LM, and the
modules that are imported once, in the process from which training processes are forked.
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

#: runs the script with the hooks
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
    """Return the command of members: a script with ``--deadpool`` runs with the hooks, any other
    command stays as given.

    Raises CommandError for a module with the flag: Megatron-LM is found by the script's path.
    """
    if FLAG not in command[1:] or script_of(command) is not None:
        return tuple(command)
    if command[0] == "-m":
        raise CommandError(f"{FLAG} is for scripts: give the file of {command[1]} instead of -m")
    return ("-m", MODULE, *command)


def script_of(command: Sequence[str]) -> str | None:
    """Return the user's script in a result of :func:`member_command`; None if there is none."""
    return command[2] if tuple(command[:2]) == ("-m", MODULE) and len(command) > 2 else None


def adopt(args: argparse.Namespace) -> tuple[str, ...]:
    """Set ``args.command`` to the members' command, and put the settings on the script's command
    line into ``args``. Return the user's command with all switches. A script of Megatron-LM in its
    checkout gets the switch --deadpool if the user did not give it.

    Raises CommandError, also for errors that each process would report later.
    """
    switches = arguments.switches_in(args)
    if FLAG not in (*args.command, *switches) and _is_megatron_script(args.command[0]):
        switches = [FLAG, *switches]
    args.command = [*args.command, *switches]
    command, lines = member_command(args.command), list[str]()
    if script_of(command) is not None:
        version = versions.tree_version(versions.tree_of(Path(args.command[0])))
        found = findings.judge(args.command, version=version)
        if line := findings.refusal(found):
            raise CommandError(line)
        lines = findings.notes(found)
        arguments.put_into(args, _settings(args.command[1:], args.options))
    if nccl_environment.is_needed(getattr(args, "deadpool_communicator", "auto")):
        lines += [line for _, line in nccl_environment.overridden(os.environ)]
    for line in lines:
        print(f"deadpool: {line}", file=sys.stderr)
    given, args.command = tuple(args.command), list(expanded(command))
    return given


def expanded(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command of the embedded trainer with its argument files expanded, as they may be
    edited during the run; any other command as it is."""
    with contextlib.suppress(UnicodeDecodeError):  # the trainer reports it
        if tuple(command[:2]) == EMBEDDED_TRAINER:
            return *command[:2], *build_parser()._read_args_from_files([*command[2:]])
    return tuple(command)


def modules(given: str | None, default: str, command: Sequence[str]) -> tuple[str, ...]:
    """Return the modules to preload: as ``given``, else those for the member's command."""
    if given is None:
        given = default if script_of(command) is None else PRELOAD
    return tuple(name for name in given.split(",") if name)


def announce(command: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Set or remove the variable that names the script. Processes that inherit ``environment`` from
    now on preload that script."""
    environment.pop(SCRIPT_VARIABLE, None)
    if script := script_of(command):
        environment[SCRIPT_VARIABLE] = str(Path(script).absolute())


def waits_for_forks(method: str) -> bool:
    """Return whether the start waits until members can be forked. Only on hosts without an NVIDIA
    driver does it do so for the method ``auto``."""
    return method == "fork" or (method == "auto" and not NVIDIA_CONTROL_DEVICE.exists())


def preload_modules(settings: Settings, modules: Sequence[str]) -> ForkServer | None:
    """Start a server that imports the modules once and forks members; None for ``exec``.

    On a host with an NVIDIA driver the imports probably use it, so that the server cannot fork. The
    start does not wait for it there, and members are parked processes unless the server reports
    that it can fork. Raises CommandError for a broken module.
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


def _settings(script_arguments: Sequence[str], own_options: Sequence[str]) -> dict[str, Any]:
    """Return the settings among the script's arguments. Raises CommandError if any is unknown or
    contradicts an option of this command."""
    try:
        own, _ = arguments.given_in(own_options, script=False)
        found, others = arguments.given_in(script_arguments, script=True)
    except argparse.ArgumentError as error:
        raise CommandError(f"in the script's arguments: {error}") from error
    unknown = next((text for text in others if text.startswith(f"{FLAG}-")), None)
    if unknown is not None:
        hint = arguments.advice_for_old(unknown) or "see 'deadpool run --help'"
        raise CommandError(f"the script's {unknown} is unknown: {hint}")
    for name, value in found.items():
        if own.get(name, value) != value:
            raise CommandError(
                f"{flag_name(name)} is {own[name]} before the '--' and {value} in the script's"
                " arguments: give it once"
            )
    return found
