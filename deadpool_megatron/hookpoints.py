"""The places of Megatron-LM where deadpool takes part, and the one decorator that marks them.

Two ways lead here: the patch set puts ``@hookpoint`` above each function, or the launcher wraps the
same functions at run time. Either way a call goes to the handler of that name, with the original
function as its first argument. Without ``--deadpool`` on the command line a marked function does
exactly what it did before, except that the two functions of the argument parser know the flags.

This module imports nothing of Megatron and nothing heavy: Megatron's modules import it.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])
#: called with the original function and the arguments of the call
Handler = Callable[..., Any]

FLAG = "--deadpool"
ALLOW_UNTESTED = "--deadpool-allow-untested-megatron"
#: takes what was read and never run, by the name of its row; may be given several times
ALLOW = "--deadpool-allow"
#: lets one unreviewed flag through, by its name without dashes, or one value of one, as
#: ``flag=value``; may be given several times
ALLOW_UNREVIEWED = "--deadpool-allow-unreviewed"
_HANDLERS_MODULE = "deadpool_megatron.megatron.pretraining.attach"
_MARK = "__deadpool_hookpoint__"


@dataclass(frozen=True)
class Point:
    """One function of Megatron-LM. ``parameters``: those that the handler relies on, by name.

    ``always``: its handler also runs without ``--deadpool``. ``since``: the first version that has
    it, as (MAJOR, MINOR).
    """

    module: str
    function: str
    parameters: tuple[str, ...]
    always: bool = False
    since: tuple[int, int] = (0, 16)


#: As they are in each supported version: tests/megatron_lm/test_points.py holds them against the
#: sources.
POINTS: tuple[Point, ...] = (
    Point("megatron.training.arguments", "add_megatron_arguments", ("parser",), always=True),
    Point("megatron.training.arguments", "validate_args", ("args",), always=True),
    # The script's own call, before pretrain().
    Point(
        "megatron.training.arguments",
        "parse_and_validate_args",
        ("extra_args_provider", "args_defaults"),
        since=(0, 18),
    ),
    Point("megatron.training.initialize", "initialize_megatron", ()),
    Point("megatron.training.initialize", "_initialize_distributed", ()),
    Point("megatron.training.initialize", "set_jit_fusion_options", ()),
    Point("megatron.training.training", "pretrain", ()),
    Point("megatron.training.training", "setup_model_and_optimizer", ()),
    Point(
        "megatron.training.training",
        "build_train_valid_test_datasets",
        ("build_train_valid_test_datasets_provider",),
    ),
    Point(
        "megatron.training.training",
        "build_train_valid_test_data_iterators",
        ("build_train_valid_test_datasets_provider",),
    ),
    Point(
        "megatron.training.training",
        "train",
        (
            "forward_step_func",
            "model",
            "optimizer",
            "opt_param_scheduler",
            "train_data_iterator",
            "valid_data_iterator",
            "config",
            "checkpointing_context",
        ),
    ),
    Point("megatron.training.training", "train_step", ("iteration",)),
    Point(
        "megatron.training.training",
        "training_log",
        ("loss_dict", "total_loss_dict", "iteration", "report_memory_flag", "skipped_iter"),
    ),
    Point("megatron.training.training", "evaluate", ()),
    Point("megatron.training.training", "evaluate_and_print_results", ("prefix", "iteration")),
    Point(
        "megatron.training.training",
        "checkpoint_and_decide_exit",
        ("iteration", "num_floating_point_operations_so_far"),
    ),
    Point("megatron.training.checkpointing", "save_checkpoint", ("iteration",)),
    Point("megatron.training.checkpointing", "load_checkpoint", ()),
)


def points_of(version: str) -> tuple[Point, ...]:
    """Returns the points that a version of Megatron, such as 0.16.1, has."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return tuple(point for point in POINTS if point.since <= (major, minor))


_always = frozenset(point.function for point in POINTS if point.always)


def hookpoint(function: _Function) -> _Function:
    """Mark ``function`` as one of :data:`POINTS`, found by its name."""
    name = function.__name__

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if name not in _always and FLAG not in sys.argv:
            return function(*args, **kwargs)
        return handlers()[name](function, *args, **kwargs)

    setattr(marked, _MARK, True)
    return cast(_Function, marked)


def is_marked(function: object) -> bool:
    """Return whether ``function`` has passed through :func:`hookpoint`."""
    return getattr(function, _MARK, False) is True


def handlers() -> Mapping[str, Handler]:
    """The handler of each point; imported at the first call, when Megatron is there already."""
    found: Mapping[str, Handler] = importlib.import_module(_HANDLERS_MODULE).HANDLERS
    return found
