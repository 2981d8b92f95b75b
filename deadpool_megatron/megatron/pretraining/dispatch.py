"""The scene, in which Megatron-LM's functions are played: each pass through pretrain() sets its own
scene.

A marked function (:mod:`deadpool_megatron.hookpoints`) for which the scene has a handler goes
there; any other does what it always did. One scene at a time, on the main thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deadpool_megatron.hookpoints import Handler

_scene: Mapping[str, Handler] | None = None


@contextmanager
def use_handlers(handlers: Mapping[str, Handler]) -> Iterator[None]:
    """Send the functions named in ``handlers`` there while the block runs."""
    global _scene
    previous, _scene = _scene, handlers
    try:
        yield
    finally:
        _scene = previous


def route(name: str) -> Handler:
    """The lasting handler of function ``name``: does what the scene says."""
    return functools.partial(_call, name)


def _call(name: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    handler = None if _scene is None else _scene.get(name)
    return original(*args, **kwargs) if handler is None else handler(original, *args, **kwargs)
