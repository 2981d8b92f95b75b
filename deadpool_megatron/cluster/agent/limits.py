"""Limits of the stages of a close on a node, so that all together end in time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_megatron.settings import Settings


@dataclass(frozen=True)
class CloseLimits:
    """``vault``: until it has stopped sealing. ``drain``: until the members have left the epoch.
    ``inventory``: for each of two answers; a vault that starts may take all that is left of both,
    and of what it takes to reap two. ``reap``: until what was killed at the end of one of these has
    ended; a vault unmaps all its slots in that time.
    """

    vault_seconds: float
    drain_seconds: float
    inventory_seconds: float
    reap_seconds: float

    @staticmethod
    def of(settings: Settings) -> CloseLimits:
        """Shares of ``close_seconds``; see :attr:`Settings.gather_seconds`."""
        half = settings.close_seconds / 2
        return CloseLimits(half, settings.close_seconds, half, half)

    @property
    def worst_seconds(self) -> float:
        """Return when every stage takes its whole time and ends by a kill."""
        stages = self.vault_seconds + self.drain_seconds + 2 * self.inventory_seconds
        return stages + 4 * self.reap_seconds
