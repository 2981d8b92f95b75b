"""Errors of a vault, in words its callers can act on."""

from __future__ import annotations

import errno
import struct
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from deadpool_megatron.layout.records import is_parity_role

_SHORT = frozenset({errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
# What comes of values of the wrong type or size; an infinite "integer" overflows.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error)


def is_shortage(error: Exception) -> bool:
    """Return whether it says nothing of a file or a disk: processes, descriptors or memory are
    short for a moment."""
    return isinstance(error, OSError) and error.errno in _SHORT


class Code(StrEnum):
    """The meaning of a refusal to another process, beside its text."""

    FAILED = "failed"
    TOO_LATE = "too-late"  # a later iteration can be had
    NO_ROOM = "no-room"


class Refusal(StrEnum):
    """Reasons for a vault not to take, or give, what another one asks of it."""

    EARLY = "early"  # the epoch, or a slot, is not there yet: ask again soon
    WAITED = "waited"  # others have not come yet: ask again at once
    SUPERSEDED = "superseded"  # something newer of the role is here: this counts as taken
    NO_BASE = "no base"  # what a step begins from was lost here
    NOT_HELD = "not held"
    STALE = "stale"  # the epoch is over
    NO_ROOM = "no copy possible"
    NO_BLOCK_POSSIBLE = "no parity block possible"
    WRONG_SENDER = "sender has no such role"
    WRONG_ITERATION = "impossible iteration"
    WRONG_LINEAGE = "abandoned lineage"
    WRONG_LAYOUT = "layout"
    WRONG_PART = "unknown or oversized part"
    WRONG_BLOCK = "no such parity block"
    WRONG_HOLDER = "parity block of another node"
    WRONG_BLOCK_PART = "unknown part of a parity block"
    OTHER_BYTES = "other bytes than a sealed parity block was made of"


# Of these nothing is wrong with anybody.
NO_OFFENCE = frozenset(
    {Refusal.EARLY, Refusal.WAITED, Refusal.SUPERSEDED, Refusal.NO_BASE, Refusal.NOT_HELD}
)


class VaultError(Exception):
    """The vault cannot do what was asked; one clear line for a person."""

    code = Code.FAILED

    @staticmethod
    def of(code: str, text: str) -> VaultError:
        """The error that another process has sent."""
        kinds: dict[str, type[VaultError]] = {Code.TOO_LATE: TooLate, Code.NO_ROOM: NoRoom}
        return kinds.get(code, VaultError)(text)


class TooLate(VaultError):
    """An answer that is late: what was asked for has been overwritten by then."""

    code = Code.TOO_LATE


class NoRoom(VaultError):
    """There is no memory for a slot: the file system is full, or the node's limit is reached."""

    code = Code.NO_ROOM


class Refused(VaultError):
    """Another vault is refused something, or refuses it. ``about``: for people."""

    def __init__(self, why: Refusal, about: str = "") -> None:
        self.why = why
        self.about = about
        super().__init__(f"{why}: {about}" if about else str(why))

    @staticmethod
    def in_answer(answer: Mapping[str, Any]) -> Refused | None:
        """Returns the refusal that an answer is, if it is one. Raises ValueError for an unknown
        one, KeyError for none."""
        if answer["t"] != "refused":
            return None
        return Refused(Refusal(answer["why"]), str(answer.get("about", "")))

    def to_message(self) -> dict[str, Any]:
        """Returns the answer that it is."""
        return {"t": "refused", "why": str(self.why), "about": self.about}


class Frozen(VaultError):
    """The epoch has been closed: the member must not write (and has not written) into a slot."""


class Interrupted(VaultError):
    """The interrupt descriptor became readable before the vault had an answer."""


class SegmentError(VaultError):
    """The file is no segment of this version, or was cut off or damaged."""


class DamagedSegment(SegmentError):
    """The file is one of this version, but what it says of itself is not what was written."""

    def __init__(self, text: str, expected: int, found: int) -> None:
        super().__init__(text)
        self.expected = expected
        self.found = found


class RestoreUnavailable(VaultError):
    """A part could not be produced from any source.

    ``tried`` holds one ``(node, role, reason)`` for each source, in the order they were tried.
    """

    def __init__(self, part: str, tried: tuple[tuple[int, int, str], ...]) -> None:
        self.part = part
        self.tried = tried
        listing = "; ".join(
            f"{'parity' if is_parity_role(role) else f'role {role}'} on node {node}: {why}"
            for node, role, why in tried
        )
        super().__init__(f"part {part} cannot be restored: {listing or 'no source is listed'}")
