"""States of schedulers and scalers as JSON values, which give back the same types.

JSON has no tuples, and its keys are text: a schedule whose milestones came back as text would never
reach them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from deadpool_megatron.state.optimizer_state import UnsupportedState

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple}
_MAPPINGS: dict[str, Any] = {"dict": dict, "Counter": Counter}


def encoded(value: Any, name: str) -> Any:
    """Return ``value`` in JSON values and tensors. Raises UnsupportedState with ``name`` for what
    cannot be given back."""
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    kind = type(value).__name__
    if _SEQUENCES.get(kind) is type(value):
        return {kind: [encoded(item, name) for item in value]}
    if _MAPPINGS.get(kind) is type(value):
        return {kind: [[encoded(k, name), encoded(v, name)] for k, v in value.items()]}
    raise UnsupportedState(f"{name} keeps a {kind}, which cannot be restored")


def decoded(value: Any) -> Any:
    """Inverse of :func:`encoded`."""
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](decoded(item) for item in items)
    return _MAPPINGS[kind]({decoded(k): decoded(v) for k, v in items})
