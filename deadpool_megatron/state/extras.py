"""Extras: the small state an iteration changes besides the shard, as bytes without pickle.

Encoding: length of a JSON header (8 bytes, little endian), the header, then the raw blobs. The
header maps each key to a JSON value or to the place of a blob (bytes or tensor). The random states
of Python, numpy and torch are captured here; the hooks add Megatron's.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Extras: TypeAlias = Mapping[str, Any]
_LENGTH = struct.Struct("<Q")


class ExtrasError(ValueError):
    """A value that cannot be encoded, or bytes that are not encoded extras."""


def encode(values: Extras) -> bytes:
    """Bytes of a mapping of JSON values, ``bytes`` and tensors (any device, copied to the host).

    Raises ExtrasError for any other value, naming its key.
    """
    header: dict[str, Any] = {}
    blobs: list[bytes] = []
    start = 0
    for key, value in values.items():
        if isinstance(value, Tensor):
            flat = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
            blob = flat.numpy().tobytes()
            header[key] = {
                "tensor": [start, len(blob)],
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
            }
        elif isinstance(value, bytes):
            blob = value
            header[key] = {"bytes": [start, len(blob)]}
        else:
            header[key] = {"json": value}
            continue
        blobs.append(blob)
        start += len(blob)
    try:
        text = json.dumps(header, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise ExtrasError(f"{_first_strange(header)} cannot be encoded: {error}") from error
    return b"".join([_LENGTH.pack(len(text)), text, *blobs])


def _first_strange(header: Mapping[str, Any]) -> str:
    for key, value in header.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return key
    return "extras"


def decode(payload: bytes | memoryview) -> dict[str, Any]:
    """Inverse of :func:`encode`; tensors come back on the CPU. Raises ExtrasError."""
    view = memoryview(payload)
    try:
        (length,) = _LENGTH.unpack_from(view)
        header = json.loads(bytes(view[_LENGTH.size : _LENGTH.size + length]))
        body = view[_LENGTH.size + length :]
        return {key: _decode_value(entry, body) for key, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        # The last two: a header that is no object, a dtype that torch does not have, a wrong shape.
        raise ExtrasError(f"not encoded extras: {error}") from error


def _decode_value(entry: Mapping[str, Any], body: memoryview) -> Any:
    if "json" in entry:
        return entry["json"]
    start, size = entry.get("tensor") or entry["bytes"]
    blob = bytearray(body[start : start + size])
    if len(blob) != size:
        raise ExtrasError("blob cut short")
    if "bytes" in entry:
        return bytes(blob)
    dtype = getattr(torch, entry["dtype"])
    if size == 0:
        return torch.empty(entry["shape"], dtype=dtype)
    return torch.frombuffer(blob, dtype=dtype).view(entry["shape"])


def capture_random_states() -> dict[str, Any]:
    """Random states of Python, numpy and torch (CPU, and the current CUDA device if there is one).

    The values are copies: later draws do not change them.
    """
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "random.python": [version, list(words), gauss],
        "random.numpy": [str(kind), int(position), int(has_gauss), float(cached)],
        "random.numpy.keys": np.asarray(keys, dtype="<u4").tobytes(),
        "random.torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: Extras) -> None:
    """Inverse of :func:`capture_random_states`."""
    version, words, gauss = states["random.python"]
    random.setstate((version, tuple(words), gauss))
    kind, position, has_gauss, cached = states["random.numpy"]
    keys = np.frombuffer(states["random.numpy.keys"], dtype="<u4")
    np.random.set_state((kind, keys, position, has_gauss, cached))
    torch.set_rng_state(states["random.torch"])
    if "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"])
