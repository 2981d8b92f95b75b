"""Where the marked functions of Megatron-LM lead; imported at the first call of one of them."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

from deadpool_megatron.hookpoints import POINTS, Handler
from deadpool_megatron.hooks import Session
from deadpool_megatron.hooks.pretraining import flags, scene
from deadpool_megatron.hooks.pretraining.build import NothingToTrain
from deadpool_megatron.hooks.pretraining.command_line import CommandLine
from deadpool_megatron.hooks.pretraining.families import family
from deadpool_megatron.hooks.pretraining.program import PretrainProgram, run_directory

EXIT_BAD_INPUT = 2


def _add_arguments(
    original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    filled: argparse.ArgumentParser = flags.add_flags(original(parser))
    return filled


def _validate(original: Callable[..., Any], args: Any, *more: Any, **kwargs: Any) -> Any:
    answer = original(args, *more, **kwargs)
    try:
        flags.refuse(args, sys.argv)
    except flags.FlagsRefused as error:
        _end(str(error))
    return answer


# Of this process, which has one command line and is a member of one run.
_command_line = CommandLine()


@functools.cache
def _session() -> Session:
    """Joined at the first call; its device is taken before anything of Megatron looks at one."""
    problem = flags.launch_problem(os.environ, sys.argv)
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
    sys.exit(EXIT_BAD_INPUT)


HANDLERS: dict[str, Handler] = {
    **{point.function: scene.through_scene(point.function) for point in POINTS},
    "add_megatron_arguments": _add_arguments,
    "validate_args": _validate,
    "parse_and_validate_args": _parse_and_validate,
    "pretrain": _pretrain,
}
