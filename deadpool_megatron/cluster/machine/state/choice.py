"""Which plan protects the run from the next epoch on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from deadpool_megatron.layout.schemes import ProtectionPlan


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
