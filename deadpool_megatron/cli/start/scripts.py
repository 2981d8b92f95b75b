"""The program of a run: a script of Megatron-LM with ``--deadpool`` on its command line becomes its
command, and what all training processes need is imported once, in the process they are forked from.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
from deadpool_megatron.support import environment as nccl_environment, findings, versions
from deadpool_megatron.trainer.config import build_parser

#: runs the script with the hooks in it
MODULE = "deadpool_megatron.megatron_lm"
PRELOAD = f"{MODULE}.preload"
EMBEDDED_TRAINER = ("-m", "deadpool_megatron.trainer")
NVIDIA_CONTROL_DEVICE = Path("/dev/nvidiactl")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # nor is the package that it is in
        return False


_FRAMEWORK = (
    ("trainer.megatron_api", "trainer.gpt_loop")
    if _is_installed("megatron.core")
    else ("torch_native",)
)
DEFAULT_PRELOAD = ",".join(f"deadpool_megatron.{name}" for name in (*_FRAMEWORK, "member"))


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


def adopt(args: argparse.Namespace) -> tuple[str, ...]:
    """Have ``args.command`` be what members run, and the settings those that the script's command
    line names. Return the user's command, with the switches that stood before it or go without
    saying: a script of Megatron-LM, in its checkout, is protected.

    Raises CommandError, also for what each process would refuse later.
    """
    switches = arguments.switches_in(args)
    if FLAG not in (*args.command, *switches) and _is_megatrons(args.command[0]):
        switches = [FLAG, *switches]
    args.command = [*args.command, *switches]
    command, told = member_command(args.command), list[str]()
    if script_of(command) is not None:
        version = versions.tree_version(versions.tree_of(Path(args.command[0])))
        found = findings.judge(args.command, version=version)
        if line := findings.refusal(found):
            raise CommandError(line)
        told = findings.notes(found)
        arguments.put_into(args, _settings(args.command[1:], args.options))
    if nccl_environment.is_needed(getattr(args, "deadpool_communicator", "auto")):
        told += [line for _, line in nccl_environment.overridden(os.environ)]
    for line in told:
        print(f"deadpool: {line}", file=sys.stderr)
    given, args.command = tuple(args.command), list(expanded(command))
    return given


def expanded(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command of the embedded trainer with what its argument files say now, any other as
    it is: they may be edited while the run lasts."""
    with contextlib.suppress(UnicodeDecodeError):  # it complains itself
        if tuple(command[:2]) == EMBEDDED_TRAINER:
            return *command[:2], *build_parser()._read_args_from_files([*command[2:]])
    return tuple(command)


def modules(given: str | None, default: str, command: Sequence[str]) -> tuple[str, ...]:
    """Return what is imported ahead: as ``given``, else what fits the member's command."""
    if given is None:
        given = default if script_of(command) is None else PRELOAD
    return tuple(name for name in given.split(",") if name)


def announce(command: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Name the script to processes that preload it from now on."""
    environment.pop(SCRIPT_VARIABLE, None)
    if script := script_of(command):
        environment[SCRIPT_VARIABLE] = str(Path(script).absolute())


def waits_for_forks(method: str) -> bool:
    """Return whether members are to be forked by all means, or where no driver could be touched."""
    return method == "fork" or (method == "auto" and not NVIDIA_CONTROL_DEVICE.exists())


def preload_modules(settings: Settings, modules: Sequence[str]) -> ForkServer | None:
    """Have what all members need imported once, by a server that forks them; None for ``exec``.

    With a driver on this host it is most likely touched: then nobody waits, and members are parked
    processes unless the server says that it forks. Raises CommandError when a module is broken.
    """
    method = settings.start_method
    if method == "exec":
        return None
    try:
        server = ForkServer.begin(modules)
        return server.ready() if waits_for_forks(method) else server
    except StartError as error:
        if method == "fork" or isinstance(error, BrokenImport):
            advice = (
                "" if isinstance(error, BrokenImport) else ": use --deadpool-set start-method=exec"
            )
            raise CommandError(f"{error}{advice}") from error
        return None


def _is_megatrons(script: str) -> bool:
    path = Path(script)
    is_beside = path.is_file() and (path.parent / "megatron" / "training").is_dir()
    return is_beside and "pretrain(" in path.read_text(errors="replace")


def _settings(script_arguments: Sequence[str], own_options: Sequence[str]) -> dict[str, Any]:
    try:
        own, _ = arguments.given_in(own_options, script=False)
        found, others = arguments.given_in(script_arguments, script=True)
    except arguments.BadValueError as error:
        raise CommandError(f"in the script's arguments: {error}") from error
    unknown = next((text for text in others if text.startswith(f"{FLAG}-")), None)
    if unknown is not None:
        hint = arguments.successor(unknown) or "see 'deadpool run --help'"
        raise CommandError(f"the script's {unknown} is unknown: {hint}")
    for name, value in found.items():
        if own.get(name, value) != value:
            raise CommandError(
                f"{flag_name(name)} is {own[name]} before the '--' and {value} in the script's"
                " arguments: give it once"
            )
    return found
