"""What is said about the store in which communicators meet: packed, unpacked, bounded.

A member, its agent and the coordinator say the same to each other, and any of it may be repeated::

    {"t": "store", "epoch": e, "values": {key: value in base64}, "want": [folder, ...]}

The first value of a key stays. The folder of a key is what stands before its last ``/``: who wants
a folder is sent all values in it, those that are there and those that come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAXIMUM_KEY_CHARACTERS = 512
MAXIMUM_VALUE_BYTES = 1 << 20
_MAXIMUM_TEXT = (MAXIMUM_VALUE_BYTES + 2) // 3 * 4


@dataclass(frozen=True)
class StoreMessage:
    """See the module text."""

    epoch: int
    values: Mapping[str, str]
    want: tuple[str, ...] = ()


def folder_of(key: str) -> str:
    """Returns the folder of a key."""
    return key.rpartition("/")[0]


def pack(epoch: int, values: Mapping[str, str], want: Iterable[str] = ()) -> dict[str, Any]:
    """Returns the message."""
    return {"t": "store", "epoch": epoch, "values": dict(values), "want": list(want)}


def unpack(message: Mapping[str, Any]) -> StoreMessage:
    """Returns what a message says. Raises ValueError for one that is malformed or too large."""
    epoch, values, want = message.get("epoch"), message.get("values"), message.get("want")
    if type(epoch) is not int or not isinstance(values, dict) or not isinstance(want, list):
        raise ValueError("malformed store message")
    if not all(_is_text(key, MAXIMUM_KEY_CHARACTERS) for key in (*values, *want)):
        raise ValueError(f"a key of the store is no text of up to {MAXIMUM_KEY_CHARACTERS} letters")
    if not all(_is_text(value, _MAXIMUM_TEXT) for value in values.values()):
        raise ValueError(f"a value of the store is no text of up to {MAXIMUM_VALUE_BYTES} bytes")
    return StoreMessage(epoch, values, tuple(want))


def _is_text(value: object, limit: int) -> bool:
    return isinstance(value, str) and len(value) <= limit
