"""Attaches to Megatron-LM: what ``--deadpool`` adds to its command line and refuses to go with, and
where the marked functions lead. Imported at the first call of one of them.

What is refused is a table in :mod:`deadpool_megatron.support`. Without ``--deadpool`` all of the
flags do nothing.
"""

from __future__ import annotations

import argparse
import functools
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deadpool_megatron import arguments
from deadpool_megatron.cluster.coordinator.durable import saves_refusal
from deadpool_megatron.cluster.failures import ExitStatus
from deadpool_megatron.hookpoints import FLAG, POINTS, Handler
from deadpool_megatron.hooks import Session
from deadpool_megatron.hooks.pretraining import scene
from deadpool_megatron.hooks.pretraining.build import CommandLine, NothingToTrain
from deadpool_megatron.hooks.pretraining.families import family
from deadpool_megatron.hooks.pretraining.program import PretrainProgram, run_directory
from deadpool_megatron.settings import Settings
from deadpool_megatron.support import flags


class FlagsRefused(ValueError):
    """A flag of Megatron-LM that a protected run cannot have; one line: which, why, what to do."""


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group ``deadpool``, with the settings of the run that this process belongs to.

    Those given to ``deadpool run`` itself are its defaults, so that Megatron's list of arguments
    shows what is in force.
    """
    defaults = Settings.from_environment(os.environ)
    arguments.add_arguments(parser, switches=True, defaults=defaults)
    return parser


def refuse(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Raise FlagsRefused for arguments, validated by Megatron, that cannot be protected, and for
    flags in ``argv``, the script's command line, that nobody has looked at."""
    if not getattr(args, "deadpool", False):
        return
    line = flags.refused(args) or flags.unreviewed(argv) or flags.one_logger_complaint(args)
    line = line or saves_refusal(getattr(args, "save", None), os.environ)
    if line:
        raise FlagsRefused(line)


def launch_problem(environ: Mapping[str, str], argv: Sequence[str]) -> str | None:
    """Return why this process cannot be protected as it was started, and the command that can; one
    line.

    None for a member of a run, and without ``--deadpool``.
    """
    if FLAG not in argv or "DEADPOOL_AGENT_FD" in environ:
        return None
    if any(name.startswith("TORCHELASTIC_") for name in environ):
        reason = "torchrun kills all ranks when one dies, so no spare could take over"
    elif "SLURM_STEP_ID" in environ:
        reason = "started by srun directly, no agent watches this process or starts another"
    else:
        reason = "no agent watches this process or starts another"
    nodes, processes = _size(environ)
    options = f"--nodes {nodes} --spares 1 --nproc-per-node {processes} --run-dir DIR"
    advice = f"start it with: deadpool run {options} -- {shlex.join(argv)}"
    if nodes > 1:
        advice += (
            " (all on this host; over several hosts, one 'deadpool agent' on each, with the same"
            " options and its --node-id)"
        )
    return f"{reason}; {advice}"


def _add_arguments(
    original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    filled: argparse.ArgumentParser = add_flags(original(parser))
    return filled


def _validate(original: Callable[..., Any], args: Any, *more: Any, **kwargs: Any) -> Any:
    answer = original(args, *more, **kwargs)
    try:
        refuse(args, sys.argv)
    except FlagsRefused as error:
        _end(str(error))
    return answer


# Of this process, which has one command line and is a member of one run.
_command_line = CommandLine()


@functools.cache
def _session() -> Session:
    """Joined at the first call; its device is taken before anything of Megatron looks at one."""
    problem = launch_problem(os.environ, sys.argv)
    if problem is not None:
        _end(problem)
    return Session.join()


def _parse_and_validate(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _session()
    return _command_line.parse_without_role(functools.partial(original, *args, **kwargs))


def _pretrain(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    def call() -> Any:
        own = family().own_config
        return original(*map(own, args), **{name: own(value) for name, value in kwargs.items()})

    session = _session()
    program = PretrainProgram(call, _command_line, run_directory())
    try:
        session.run(program)
    except NothingToTrain as error:
        _end(str(error))


def _end(problem: str) -> None:
    print(f"deadpool: {problem}", file=sys.stderr, flush=True)
    sys.exit(ExitStatus.BAD_INPUT)


def _size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Nodes, and processes on each, as another launcher has set them; 1 where it says nothing."""
    if "SLURM_STEP_ID" in environ and "LOCAL_WORLD_SIZE" not in environ:
        nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        return nodes, max(1, _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") // nodes)
    world = _number(environ, "WORLD_SIZE")
    local = min(world, _number(environ, "LOCAL_WORLD_SIZE"))
    return world // local, local


def _number(environ: Mapping[str, str], *names: str) -> int:
    for name in names:
        if environ.get(name, "").isdigit():
            return max(1, int(environ[name]))
    return 1


HANDLERS: dict[str, Handler] = {
    **{point.function: scene.through_scene(point.function) for point in POINTS},
    "add_megatron_arguments": _add_arguments,
    "validate_args": _validate,
    "parse_and_validate_args": _parse_and_validate,
    "pretrain": _pretrain,
}
