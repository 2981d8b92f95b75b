"""Megatron's classes in a process that carries their objects from one file to another.

The arguments of a run hold members of Megatron's enumerations, by the name of their class. To
import that class would import Megatron, the very one that the members have, with all that it needs.
Here a name is all there is: an object of such a class is written again as it was read.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

_PACKAGE = "megatron"


def install() -> None:
    """Have every module of Megatron be a stand-in, in this process; before one is imported."""
    assert _PACKAGE not in sys.modules, "Megatron was imported here"
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != _PACKAGE:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Module(types.ModuleType):
    """Has a class of every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Class(name, (), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Class(type):
    """One of Megatron's. pickle makes its plain objects by itself, and asks here for the others: a
    call, as most versions of Python write the member of an enumeration, or an attribute, as some
    versions of 3.11 do."""

    def __call__(cls, *given: Any) -> Any:
        return _Made(cls, given)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Made(getattr, (cls, name))


class _Made:
    """Written as what made it."""

    def __init__(self, function: Any, given: tuple[Any, ...]) -> None:
        self._made = function, given

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._made
