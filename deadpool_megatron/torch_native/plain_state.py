"""States of schedulers and scalers as JSON values, from which the same types are restored.

JSON has no tuples, and its keys are text: a schedule whose milestones were restored as text would
never reach them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor

from deadpool_megatron.state.optimizer_state import UnsupportedState

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple}
_MAPPINGS: dict[str, Any] = {"dict": dict, "Counter": Counter}


def to_plain(value: Any, name: str) -> Any:
    """Return ``value`` as JSON values and tensors. Raises UnsupportedState, which names ``name``,
    for a value that cannot be restored."""
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    kind = type(value).__name__
    if _SEQUENCES.get(kind) is type(value):
        return {kind: [to_plain(item, name) for item in value]}
    if _MAPPINGS.get(kind) is type(value):
        return {kind: [[to_plain(k, name), to_plain(v, name)] for k, v in value.items()]}
    raise UnsupportedState(f"{name} keeps a {kind}, which cannot be restored")


def from_plain(value: Any) -> Any:
    """Inverse of :func:`to_plain`."""
    if not isinstance(value, dict):
        return value
    ((kind, items),) = value.items()
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](from_plain(item) for item in items)
    return _MAPPINGS[kind]({from_plain(k): from_plain(v) for k, v in items})
