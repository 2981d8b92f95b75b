"""How far the run has come, and what it can go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deadpool_megatron.layout.decision import is_kept
from deadpool_megatron.layout.records import Generation, Restore


@dataclass(frozen=True)
class KeptLine:
    """``kept``: see layout.decision.keep_line. ``newest``: last iteration reported by an open
    epoch. ``durable``: the checkpoint that became valid last. ``ever_ran``: whether an epoch was
    ever open.
    """

    kept: Mapping[int, int] = field(default_factory=dict)
    newest: int = 0
    durable: Restore | None = None
    ever_ran: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever computed."""
        return not self.ever_ran and not self.newest

    def keeps(self, generation: Generation) -> bool:
        """Returns whether training went on from this generation, or may."""
        return is_kept(self.kept, generation)

    def reached(self, iteration: int) -> KeptLine:
        """Returns the line after a role has completed an iteration."""
        return replace(self, newest=iteration) if iteration > self.newest else self
