"""The replacement of an attribute while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# An inherited method, or a builtin.
_NOT_ITS_OWN = object()


@contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Have ``module.name`` be ``value`` while the block runs; ``module`` may be any object."""
    previous = vars(module).get(name, _NOT_ITS_OWN)
    setattr(module, name, value)
    try:
        yield
    finally:
        if previous is _NOT_ITS_OWN:
            delattr(module, name)
        else:
            setattr(module, name, previous)
