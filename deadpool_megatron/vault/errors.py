"""What can go wrong with a vault, in words its callers can act on."""

from __future__ import annotations

from enum import StrEnum

from deadpool_megatron.layout.places.parity import is_parity_role


class Code(StrEnum):
    """What a refusal means to another process, beside its text."""

    FAILED = "failed"
    TOO_LATE = "too-late"  # a later iteration can be had


class VaultError(Exception):
    """The vault cannot do what was asked; one clear line for a person."""

    code = Code.FAILED

    @staticmethod
    def of(code: str, text: str) -> VaultError:
        """The error that another process has sent."""
        return TooLate(text) if code == Code.TOO_LATE else VaultError(text)


class TooLate(VaultError):
    """What was asked for has been overwritten by then."""

    code = Code.TOO_LATE


class NoRoom(VaultError):
    """There is no memory for a slot: the file system is full, or the node's limit is reached."""


class Frozen(VaultError):
    """The epoch has been closed: the member must not write (and has not written) into a slot."""


class Interrupted(VaultError):
    """The interrupt descriptor became readable before the vault had an answer."""


class SegmentError(VaultError):
    """The file is no segment of this version, or was cut off or damaged."""


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
