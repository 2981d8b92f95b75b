"""Dispatch of hooked Megatron-LM functions to the handlers in use.

A call of a hooked function (:mod:`deadpool_megatron.hookpoints`) goes to the handler in use for
that function, or else to the function itself. Main thread only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deadpool_megatron.hookpoints import Handler

_in_use: Mapping[str, Handler] = {}


@contextmanager
def use_handlers(handlers: Mapping[str, Handler]) -> Iterator[None]:
    """Send calls of the functions named in ``handlers`` there while the block runs."""
    global _in_use
    previous, _in_use = _in_use, handlers
    try:
        yield
    finally:
        _in_use = previous


def route(name: str) -> Handler:
    """Return the permanent handler of function ``name``, which calls the handler in use."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        handler = _in_use.get(name)
        return original(*args, **kwargs) if handler is None else handler(original, *args, **kwargs)

    return call


def bound_arguments(
    original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call of ``original`` by name, with the defaults."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
