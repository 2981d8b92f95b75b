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
from deadpool_megatron.hooks.generations.optimizer import UnsupportedOptimizer
from deadpool_megatron.hooks.pretraining import flags, scene
from deadpool_megatron.hooks.pretraining.build import NothingToTrain
from deadpool_megatron.hooks.pretraining.program import PretrainProgram, run_directory
from deadpool_megatron.persist.skeleton import SkeletonError

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


def _pretrain(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    problem = flags.launch_problem(os.environ, sys.argv)
    if problem is not None:
        _end(problem)
    program = PretrainProgram(functools.partial(original, *args, **kwargs), run_directory())
    try:
        Session.join().run(program)
    except (NothingToTrain, UnsupportedOptimizer, SkeletonError) as error:
        _end(str(error))


def _end(problem: str) -> None:
    print(f"deadpool: {problem}", file=sys.stderr, flush=True)
    sys.exit(EXIT_BAD_INPUT)


HANDLERS: dict[str, Handler] = {
    **{point.function: scene.through_scene(point.function) for point in POINTS},
    "add_megatron_arguments": _add_arguments,
    "validate_args": _validate,
    "pretrain": _pretrain,
}
