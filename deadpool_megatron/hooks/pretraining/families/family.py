"""What the hooks ask of a family of Megatron-LM versions that answer it in the same way."""

from __future__ import annotations

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
    """See the module text. Megatron can be imported when a method is called."""

    @abstractmethod
    def globals_setter(self) -> Place:
        """What makes tokenizer, writers and timers of the parsed arguments."""

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
        """Where role 0 writes what all roles have in common, without its peers."""

    @abstractmethod
    def openers(self) -> tuple[Place, ...]:
        """What opens the files that role 0 writes at the end of a save: the tracker, the log of
        progress."""

    @abstractmethod
    def finalising(self) -> Place:
        """Where all roles together write the metadata of a checkpoint."""

    @abstractmethod
    def drop_saves(self) -> None:
        """Stop the writers of asynchronous saves and forget what they were writing."""
