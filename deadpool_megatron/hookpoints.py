"""The functions of Megatron-LM that deadpool hooks, and the decorator that marks them.

Either a patch set puts ``@hookpoint`` above each function, or the functions are wrapped at run
time. A call then goes to the handler of the same name, with the original function as its first
argument. Without ``--deadpool`` on the command line a marked function behaves as before, except
that the two functions of the argument parser know the flags.

This module imports nothing of Megatron and nothing heavy, as Megatron's modules import it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: a function that is called with the original function and the arguments of the call
Handler = Callable[..., Any]

FLAG = "--deadpool"
ALLOW_UNTESTED = "--deadpool-allow-untested-megatron"
#: flag that accepts flags that were read and never run, by the name of their row; may be repeated
ALLOW = "--deadpool-allow"
#: flag that accepts an unreviewed flag, by its name without dashes, or a value of a flag, as
#: ``flag=value``; may be repeated
ALLOW_UNREVIEWED = "--deadpool-allow-unreviewed"
#: variable with the script, for processes that import everything before they know their command
SCRIPT_VARIABLE = "DEADPOOL_SCRIPT"
_HANDLERS_MODULE = "deadpool_megatron.megatron.pretraining.pretrain_program"
_MARK = "__deadpool_hookpoint__"


@dataclass(frozen=True)
class Point:
    """A function of Megatron-LM. ``parameters``: the parameters that its handler requires.

    ``always``: the handler also runs without ``--deadpool``. ``since``: the first version that has
    the function, as (MAJOR, MINOR).
    """

    module: str
    function: str
    parameters: tuple[str, ...]
    always: bool = False
    since: tuple[int, int] = (0, 16)


def _points(module: str, *, always: bool = False, **points: str) -> tuple[Point, ...]:
    """Return points of ``megatron.training.MODULE``. ``points``: the parameters of each function,
    separated by blanks."""
    module = f"megatron.training.{module}"
    return tuple(Point(module, name, tuple(text.split()), always) for name, text in points.items())


#: all points; tests/megatron_lm/test_points.py compares them with the sources of each version
POINTS: tuple[Point, ...] = (
    *_points("arguments", always=True, add_megatron_arguments="parser", validate_args="args"),
    # The script itself calls this function before pretrain().
    Point(
        "megatron.training.arguments",
        "parse_and_validate_args",
        ("extra_args_provider", "args_defaults"),
        since=(0, 18),
    ),
    *_points("initialize", initialize_megatron="", _initialize_distributed=""),
    *_points("initialize", set_jit_fusion_options=""),
    *_points("training", pretrain="", setup_model_and_optimizer=""),
    *_points(
        "training",
        build_train_valid_test_datasets="build_train_valid_test_datasets_provider",
        build_train_valid_test_data_iterators="build_train_valid_test_datasets_provider",
        train="forward_step_func model optimizer opt_param_scheduler train_data_iterator"
        " valid_data_iterator config checkpointing_context",
        train_step="iteration",
        training_log="loss_dict total_loss_dict iteration report_memory_flag skipped_iter",
        evaluate="",
        evaluate_and_print_results="prefix iteration",
        checkpoint_and_decide_exit="iteration num_floating_point_operations_so_far",
    ),
    *_points("checkpointing", save_checkpoint="iteration", load_checkpoint=""),
)


def points_of(version: str) -> tuple[Point, ...]:
    """Return the points that a version of Megatron, such as 0.16.1, has."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return tuple(point for point in POINTS if point.since <= (major, minor))


_always = frozenset(point.function for point in POINTS if point.always)


def hookpoint(function: _Function) -> _Function:
    """Mark ``function``, whose name is in :data:`POINTS`."""
    name = function.__name__

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if name not in _always and FLAG not in sys.argv:
            return function(*args, **kwargs)
        return handlers()[name](function, *args, **kwargs)

    setattr(wrapper, _MARK, True)
    return cast(_Function, wrapper)


def is_marked(function: object) -> bool:
    """Return whether ``function`` is a result of :func:`hookpoint`."""
    return getattr(function, _MARK, False) is True


def handlers() -> Mapping[str, Handler]:
    """Return the handler of each point. The handlers are imported at the first call, when Megatron
    is loaded."""
    table: Mapping[str, Handler] = importlib.import_module(_HANDLERS_MODULE).HANDLERS
    return table
