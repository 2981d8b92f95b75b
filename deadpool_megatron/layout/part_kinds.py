"""Kinds of the parts of a generation, by their names. Pure."""

from __future__ import annotations

from enum import Enum

# Moments after training iteration k at which extras are captured, in the order they happen.
BOUNDARIES: tuple[str, ...] = ("step", "evaluation", "save", "validation", "test")
_EXTRAS = "extras@"
_STEP = "step@"
_GRADIENTS = "step@gradients."
#: Values of the parameter groups as the update used them; of no bytes: no step for this generation.
UPDATE_PART = "step@update"
#: JSON: shard part -> [bytes, checksum] after the update. Written by the owner's vault.
SUMS_PART = "step@sums"


class PartKind(Enum):
    """``SHARD``: of the optimizer's state. ``EXTRAS``: all else that an iteration changes, as of a
    boundary. ``STEP``: what recomputes an update (:mod:`.replaying`)."""

    SHARD = "shard"
    EXTRAS = "extras"
    STEP = "step"


def kind_of(name: str) -> PartKind:
    """Returns what a part is."""
    if name.startswith(_EXTRAS):
        return PartKind.EXTRAS
    return PartKind.STEP if name.startswith(_STEP) else PartKind.SHARD


def extras_part(boundary: str) -> str:
    """Name of the part that holds the extras captured at ``boundary``."""
    return _EXTRAS + boundary


def gradients_part(shard_part: str) -> str:
    """Name of the part with the gradients of an update of ``shard_part``."""
    return _GRADIENTS + shard_part


def shard_of(name: str) -> str | None:
    """Inverse of :func:`gradients_part`; None for any other part."""
    return name.removeprefix(_GRADIENTS) if name.startswith(_GRADIENTS) else None
