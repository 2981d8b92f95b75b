"""Lets Megatron import what is not installed, where it does so without being asked.

A few of its modules import Triton whether or not their kernels are ever called, and some name what
only a later Python has. Everybody else, PyTorch among them, tests for Triton and goes on without,
so it is there for those modules alone.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import typing_extensions

# 0.16 and later: initialize.py imports it. 0.18: the experts, which in 0.19 import the last.
_WITHOUT_BEING_ASKED = frozenset(
    {
        "megatron.core.transformer.custom_layers.batch_invariant_kernels",
        "megatron.core.transformer.moe.paged_stash",
        "megatron.core.transformer.moe.ops.paged_stash",
    }
)


@contextlib.contextmanager
def answered() -> Iterator[None]:
    """While the block runs, kernels that nobody can call can be defined."""
    if not hasattr(typing, "override"):  # before Python 3.12; 0.18, training/models/hybrid.py:5
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    real, triton = builtins.__import__, _Stub("triton")
    triton.language = _Stub("triton.language")

    def find(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        asks = (globals or {}).get("__name__")
        if name.split(".")[0] == "triton" and asks in _WITHOUT_BEING_ASKED:
            return triton.language if fromlist and name == "triton.language" else triton
        return real(name, globals, locals, fromlist or (), level)

    builtins.__import__ = find
    try:
        yield
    finally:
        builtins.__import__ = real


class _Stub(types.ModuleType):
    """A module all of whose names are decorators that leave the function as it is."""

    language: types.ModuleType

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _leave


def _leave(function: Callable[..., Any] | None = None, **_options: object) -> Any:
    return _leave if function is None else function
