"""The differences between versions of Megatron-LM: one small class for each family of them.

Everything else in these hooks asks :func:`family` and no version. Megatron can be imported when a
method is called.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.hooks.pretraining.scene import replaced


@dataclass(frozen=True)
class Place:
    """A function of Megatron where its callers look it up: ``name`` in ``holder``."""

    holder: Any
    name: str


class Family(ABC):
    """Versions of Megatron-LM that answer what the hooks ask in the same way."""

    @abstractmethod
    def globals_setter(self) -> Place:
        """Return what makes tokenizer, writers and timers of the parsed arguments."""

    @abstractmethod
    def own_config(self, argument: Any) -> Any:
        """Returns an argument of pretrain() such that what training changes in it stays there."""

    def set_up_around(self, set_up: Callable[..., Any], model: Any) -> Any:
        """Returns what ``set_up``, a call of setup_model_and_optimizer(), makes around
        ``model``, which is there already."""
        from megatron.training import training

        with replaced(training, "get_model", lambda *_args, **_kwargs: model):
            return set_up()

    @abstractmethod
    def common_saves(self) -> tuple[Place, ...]:
        """Return where role 0 writes what all roles have in common, without its peers."""

    @abstractmethod
    def openers(self) -> tuple[Place, ...]:
        """Return what opens the files that role 0 writes at the end of a save: the tracker, the log
        of progress."""

    @abstractmethod
    def finalising(self) -> Place:
        """Return where all roles together write the metadata of a checkpoint."""

    @abstractmethod
    def drop_saves(self) -> None:
        """Stop the writers of asynchronous saves and forget what they were writing."""


class Megatron016(Family):
    """Asynchronous saves have their queue from the start."""

    def globals_setter(self) -> Place:
        from megatron.training import initialize

        return Place(initialize, "set_global_variables")

    def own_config(self, argument: Any) -> Any:
        return argument

    def common_saves(self) -> tuple[Place, ...]:
        from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy

        return (Place(TorchCommonSaveStrategy, "save_common"),)

    def openers(self) -> tuple[Place, ...]:
        from megatron.training import checkpointing, utils

        return Place(checkpointing, "open_file"), Place(utils, "open_file")

    def finalising(self) -> Place:
        from megatron.core.dist_checkpointing.strategies import torch

        return Place(torch, "save_state_dict_async_finalize")

    def drop_saves(self) -> None:
        from megatron.training import async_utils

        queue = async_utils._async_calls_queue
        _abort_writers(queue)
        async_utils._async_calls_queue = type(queue)(persistent=queue.persistent)


class Megatron017(Family):
    """The first asynchronous save makes the queue; saving is made of functions."""

    def globals_setter(self) -> Place:
        from megatron.training import initialize

        return Place(initialize, "set_global_variables")

    def own_config(self, argument: Any) -> Any:
        return argument

    def common_saves(self) -> tuple[Place, ...]:
        from megatron.core.dist_checkpointing import serialization

        return (Place(serialization, "save_common"),)

    def openers(self) -> tuple[Place, ...]:
        from megatron.training import checkpointing, utils

        return Place(checkpointing, "open_file"), Place(utils, "open_file")

    def finalising(self) -> Place:
        # Each save imports it anew (strategies/torch.py, _import_mcore_async).
        from megatron.core.dist_checkpointing.strategies import state_dict_saver

        return Place(state_dict_saver, "save_state_dict_async_finalize")

    def drop_saves(self) -> None:
        from megatron.training import async_utils

        if async_utils._async_calls_queue is not None:
            _abort_writers(async_utils._async_calls_queue)
        async_utils._async_calls_queue = None


class Megatron018(Megatron017):
    """The script parses its arguments, and hands pretrain() a config made of them."""

    def globals_setter(self) -> Place:
        from megatron.training import arguments

        return Place(arguments, "set_global_variables")

    def own_config(self, argument: Any) -> Any:
        from megatron.training.config.container import PretrainConfigContainer

        # train() refuses a config in which it finds its own functions.
        return (
            copy.deepcopy(argument) if isinstance(argument, PretrainConfigContainer) else argument
        )

    def openers(self) -> tuple[Place, ...]:
        from megatron.training import checkpointing
        from megatron.training.utils import log_utils

        return Place(checkpointing, "open_file"), Place(log_utils, "open")


class Megatron019(Megatron018):
    """Models are built from the config, and checkpoints have no common file."""

    def set_up_around(self, set_up: Callable[..., Any], model: Any) -> Any:
        # Without a model in the config it asks get_model().
        return super().set_up_around(
            lambda: set_up(cfg_container=None, model_provider_func=_never), model
        )

    def common_saves(self) -> tuple[Place, ...]:
        return ()

    def openers(self) -> tuple[Place, ...]:
        from megatron.training import checkpointing
        from megatron.training.utils import log_utils

        return Place(checkpointing.maybe_msc, "open"), Place(log_utils, "open")


_NEWEST = Megatron019
_FAMILIES: dict[str, type[Family]] = {
    "0.16": Megatron016,
    "0.17": Megatron017,
    "0.18": Megatron018,
}


@functools.cache
def family() -> Family:
    """Returns that of the Megatron in use; a version that nobody tried counts as the newest."""
    from megatron.core.package_info import __version__

    return _FAMILIES.get(".".join(__version__.split(".")[:2]), _NEWEST)()


def _abort_writers(queue: Any) -> None:
    """Stop what an AsyncCallsQueue has under way, and drop the results."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for caller in {id(call.async_caller): call.async_caller for call in queue.async_calls}.values():
        caller.close(abort=True)
    # What an aborted writer has put there would be taken for the next one's result.
    filesystem_async._results_queue = None


def _never(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("the model is there already")
