"""The differences between versions of Megatron-LM, a row for each family of versions.

The rest of the package asks :func:`family`, never a version. The methods of a family import
Megatron when they are called.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.megatron.replacement import replaced
from deadpool_megatron.support.versions import FAMILIES


@dataclass(frozen=True)
class Family:
    """Versions of Megatron-LM with the same behaviour and the same functions in the same modules: a
    row of ``support/tables/versions.toml``, which explains each column."""

    globals_setter: str
    finalising: str
    common_saves: tuple[str, ...]
    openers: tuple[str, ...]
    config_class: str = ""
    built_from_config: bool = False
    queue_from_start: bool = False

    def own_config(self, argument: Any) -> Any:
        """Return an argument of pretrain(), or a copy of it if training would change it."""
        if not self.config_class:
            return argument
        holder, name = place(self.config_class)
        return copy.deepcopy(argument) if isinstance(argument, getattr(holder, name)) else argument

    def set_up_around(self, set_up: Callable[..., Any], model: Any) -> Any:
        """Return the result of ``set_up``, a call of setup_model_and_optimizer(), with ``model`` as
        the model."""
        from megatron.training import training

        # Without a model in the config, set_up() calls get_model().
        no_model = {"cfg_container": None, "model_provider_func": _never}
        with replaced(training, get_model=lambda *_args, **_kwargs: model):
            return set_up(**no_model) if self.built_from_config else set_up()

    def drop_saves(self) -> None:
        """Stop the writers of asynchronous saves and forget their saves."""
        from megatron.training import async_utils

        queue = async_utils._async_calls_queue
        if queue is not None:
            _abort_writers(queue)
        # Versions with a queue from the start make it only then, so it is replaced here.
        renewed = type(queue)(persistent=queue.persistent) if self.queue_from_start else None
        async_utils._async_calls_queue = renewed


@functools.cache
def family() -> Family:
    """Return the family of the Megatron in use; an unknown version counts as the newest."""
    from megatron.core.package_info import __version__

    newest = list(FAMILIES.values())[-1]
    return Family(**FAMILIES.get(".".join(__version__.split(".")[:2]), newest))


def place(named: str) -> tuple[Any, str]:
    """Return the holder and the name of a function or class of Megatron, where its callers look it
    up.

    ``named``: ``MODULE:NAME`` or ``MODULE:HOLDER.NAME``.
    """
    module, _, path = named.partition(":")
    *holders, name = path.split(".")
    return functools.reduce(getattr, holders, importlib.import_module(module)), name


def _abort_writers(queue: Any) -> None:
    """Stop the writers of an AsyncCallsQueue, and drop their results."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for caller in {id(call.async_caller): call.async_caller for call in queue.async_calls}.values():
        caller.close(abort=True)
    # A result of an aborted writer would be taken for that of the next writer.
    filesystem_async._results_queue = None


def _never(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("the model is there already")
