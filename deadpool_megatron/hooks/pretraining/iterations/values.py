"""What a training step returns, and the sums of the log, as JSON and back, exactly.

Numbers survive JSON bit for bit: Python writes the shortest text that reads back the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def encode(value: Any) -> Any:
    """JSON form of None, numbers, strings, tensors of numbers, and tuples, lists, dicts of those.

    Raises TypeError for anything else: it could not be given back after a recovery.
    """
    if isinstance(value, Tensor):
        flat = value.detach().cpu()
        kind = str(flat.dtype).removeprefix("torch.")
        return {"tensor": flat.reshape(-1).tolist(), "dtype": kind, "shape": list(flat.shape)}
    if isinstance(value, dict):
        return {"dict": [[key, encode(entry)] for key, entry in value.items()]}
    if isinstance(value, tuple | list):
        return {type(value).__name__: [encode(entry) for entry in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} in the result of train_step cannot be kept")


def decode(value: Any, device: torch.device) -> Any:
    """Inverse of :func:`encode`; tensors on ``device``."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        dtype = getattr(torch, value["dtype"])
        return torch.tensor(value["tensor"], dtype=dtype).reshape(value["shape"]).to(device)
    if "dict" in value:
        return {key: decode(entry, device) for key, entry in value["dict"]}
    if "tuple" in value:
        return tuple(decode(entry, device) for entry in value["tuple"])
    return [decode(entry, device) for entry in value["list"]]
