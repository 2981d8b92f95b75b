"""The replacement of attributes while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The previous value of an attribute that the owner did not have itself: an inherited method, or a
# builtin.
_ABSENT = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of ``owner``, a module or any object, these values while the block runs."""
    previous = {name: vars(owner).get(name, _ABSENT) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
