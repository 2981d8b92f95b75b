"""Extras: the small state that an iteration changes apart from the shard, as bytes without pickle.

The encoding is the length of a JSON object (8 bytes, little endian), the object, then raw blobs.
Instead of a tensor or bytes, the object has the place of a blob. The random states of Python, numpy
and torch are captured here; the hooks of a framework add its own.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from deadpool_megatron.state.parts import flat_bytes

Extras: TypeAlias = Mapping[str, Any]
_LENGTH = struct.Struct("<Q")
# The keys of an object that has the place of a blob.
_PLACE_KEYS = {"blob", "dtype", "shape"}


class ExtrasError(ValueError):
    """A value that cannot be encoded, or bytes that are not encoded extras."""


def encode(values: Extras) -> bytes:
    """Encode a mapping of JSON values, ``bytes`` and tensors (of the host and one device). Tuples
    become lists.

    Raises ExtrasError for any other value; the message names its key.
    """
    blobs, end = list[Tensor | bytes](), 0

    def place(value: Any) -> dict[str, Any]:
        nonlocal end
        dtype, shape, start = "", list[int](), end
        if isinstance(value, Tensor):
            dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
            value = flat_bytes(value)
        elif not isinstance(value, bytes):
            raise TypeError(f"a {type(value).__name__}")
        blobs.append(value)
        end += len(value)
        return {"blob": [start, len(value)], "dtype": dtype, "shape": shape}

    encoder, entries = json.JSONEncoder(separators=(",", ":"), default=place), []
    for key, value in values.items():
        try:
            entries.append(f"{json.dumps(key)}:{encoder.encode(value)}")
        except (TypeError, ValueError) as error:
            raise ExtrasError(f"{key} cannot be encoded: {error}") from error
    text = f"{{{','.join(entries)}}}".encode()
    return b"".join([_LENGTH.pack(len(text)), text, *_on_host(blobs)])


def _on_host(blobs: Sequence[Tensor | bytes]) -> Iterator[bytes]:
    """Yield the bytes of each blob. The host waits once for all tensors that are on a device."""
    away = [blob for blob in blobs if isinstance(blob, Tensor) and blob.device.type != "cpu"]
    sizes = [len(blob) for blob in away]
    moved = iter(torch.split(torch.cat(away).cpu(), sizes) if away else ())
    for blob in blobs:
        if isinstance(blob, Tensor):
            yield (blob if blob.device.type == "cpu" else next(moved)).numpy().tobytes()
        else:
            yield blob


def decode(payload: bytes | memoryview, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Decode the bytes of :func:`encode`, with tensors on ``device``. Raises ExtrasError."""
    view = memoryview(payload)
    try:
        (length,) = _LENGTH.unpack_from(view)
        body = view[_LENGTH.size + length :]

        def resolve(values: dict[str, Any]) -> Any:
            return values if values.keys() != _PLACE_KEYS else _blob(values, body, device)

        text = bytes(view[_LENGTH.size : _LENGTH.size + length])
        return dict(json.loads(text, object_hook=resolve))
    except (struct.error, ValueError, TypeError, AttributeError, RuntimeError) as error:
        # AttributeError: torch has no such dtype. RuntimeError: the shape does not fit the bytes.
        raise ExtrasError(f"not encoded extras: {error}") from error


def refuse_other_tensors(
    live: Mapping[str, Tensor], kept: Mapping[str, Tensor], subject: str
) -> None:
    """Raise ExtrasError unless the tensors have the same names and shapes. The message begins with
    ``subject``."""
    shapes, others = ({name: t.shape for name, t in each.items()} for each in (live, kept))
    if shapes != others:
        names = sorted({name for name, _ in shapes.items() ^ others.items()})
        raise ExtrasError(f"{subject}: {', '.join(names[:5])}")


def _blob(place: Mapping[str, Any], body: memoryview, device: torch.device | str) -> Any:
    start, size = place["blob"]
    blob = bytearray(body[start : start + size])
    if len(blob) != size:
        raise ExtrasError("blob cut short")
    if not place["dtype"]:
        return bytes(blob)
    dtype = getattr(torch, place["dtype"])
    if size == 0:
        return torch.empty(place["shape"], dtype=dtype, device=device)
    return torch.frombuffer(blob, dtype=dtype).view(place["shape"]).to(device)


def capture_random_states() -> dict[str, Any]:
    """Return the random states of Python, numpy and torch (of the CPU, and of the current CUDA
    device, if any).

    The values are copies, which later draws do not change.
    """
    version, state, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "random.python": [version, list(state), gauss],
        "random.numpy": [str(kind), int(position), int(has_gauss), float(cached)],
        "random.numpy.keys": np.asarray(keys, dtype="<u4").tobytes(),
        "random.torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["random.cuda"] = torch.cuda.get_rng_state()
    return states


def library_states(states: Extras) -> tuple[Any, Any]:
    """Return the random states of Python and numpy in the form that these libraries accept."""
    version, state, gauss = states["random.python"]
    kind, position, has_gauss, cached = states["random.numpy"]
    keys = np.frombuffer(states["random.numpy.keys"], dtype="<u4").astype(np.uint32)
    return (version, tuple(state), gauss), (kind, keys, position, has_gauss, cached)


def restore_random_states(states: Extras) -> None:
    """Restore the states of :func:`capture_random_states`."""
    python, numpy = library_states(states)
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(states["random.torch"])
    if "random.cuda" in states:
        torch.cuda.set_rng_state(states["random.cuda"])
