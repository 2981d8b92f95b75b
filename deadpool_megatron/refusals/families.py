"""Flags that are judged alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Flags that are judged alike. ``reason``: why they may pass, or why nobody vouches for them.

    ``names``: the flags without their dashes, parted by blanks.
    """

    title: str
    reason: str
    names: str

    @property
    def flags(self) -> tuple[str, ...]:
        """As a user writes them."""
        return tuple(f"--{name}" for name in self.names.split())
