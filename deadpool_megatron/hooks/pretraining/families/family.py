"""What the hooks ask of a family of Megatron-LM versions that answer it in the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Place:
    """A function of Megatron where its callers look it up: ``name`` in ``holder``."""

    holder: ModuleType | type
    name: str


class Family(ABC):
    """See the module text. Megatron can be imported when a method is called."""

    @abstractmethod
    def common_save(self) -> Place:
        """Where role 0 writes what all roles have in common, without its peers."""

    @abstractmethod
    def finalising(self) -> Place:
        """Where all roles together write the metadata of a checkpoint."""

    @abstractmethod
    def drop_saves(self) -> None:
        """Stop the writers of asynchronous saves and forget what they were writing."""
