"""What a role does with a verdict of its audit."""

from __future__ import annotations

from deadpool_megatron.hooks.audit.verdict import Accusation
from deadpool_megatron.hooks.reports import Reports


def stop_if_wrong(reports: Reports, iteration: int, verdict: Accusation | None) -> None:
    """Tell the coordinator, and go no further: this iteration has no generation. Then it ends by
    what ends the epoch; without a verdict it returns."""
    if verdict is None:
        return
    roles, what, certain = list(verdict.roles), verdict.what, verdict.is_certain
    reports.say("audit-failed", iteration=iteration, roles=roles, certain=certain, what=what)
    reports.stand_still(f"{what} in iteration {iteration} differ, roles {roles}")
