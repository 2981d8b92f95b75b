"""How far the run has come, what it can go on from, and what protects it from here on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from deadpool_megatron.layout.decision import is_kept
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.layout.schemes import ProtectionPlan

_NOTHING = Generation(0, 0)


@dataclass(frozen=True)
class KeptLine:
    """``kept``: see layout.decision.keep_line. ``newest``: last iteration reported by an open
    epoch. ``durable``: the checkpoint that became valid last. ``ever_ran``: whether an epoch was
    ever open. ``told``: the last iteration reported by the newest epoch that has reported any: it
    is behind ``newest`` after a return to an old checkpoint.
    """

    kept: Mapping[int, int] = field(default_factory=dict)
    newest: int = 0
    durable: Restore | None = None
    ever_ran: bool = False
    told: Generation = _NOTHING

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever computed."""
        return not self.ever_ran and not self.newest

    def reported(self, generation: Generation) -> KeptLine:
        """Returns the line when an iteration was reported."""
        newest, told = max(self.newest, generation.iteration), max(self.told, generation)
        return replace(self, newest=newest, told=told)

    def keeps(self, generation: Generation) -> bool:
        """Returns whether training went on from this generation, or may."""
        return is_kept(self.kept, generation)


@dataclass(frozen=True)
class ChosenProtection:
    """``plan``: for the next record. ``why``: why it is another one than the last. ``told``: the
    one that was reported last."""

    plan: ProtectionPlan = field(default_factory=ProtectionPlan)
    why: str = ""
    told: ProtectionPlan | None = None

    def changed(self, plan: ProtectionPlan, why: str) -> ChosenProtection:
        """Returns the choice of another plan."""
        return replace(self, plan=plan, why=why)
