"""What a user has asked of the protection, kept for the coordinators that come later.

A plan is wanted until an epoch has it, which may be many iterations away. Whether the scheme is the
user's or chosen by what is measured (``mixed``) counts until the next word about it, or until the
run is started again with settings of its own. What the run asks of itself is found out anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_megatron.cluster.journal.entries import Journal
from deadpool_megatron.layout.schemes import ProtectionPlan

WHY = "asked for by 'deadpool protect'"
_KIND = "plan"


@dataclass(frozen=True)
class Wanted:
    """``plan``: None where the newest record has it, or a later one. ``mixed``: None where nobody
    has said anything about it."""

    plan: ProtectionPlan | None = None
    mixed: bool | None = None


def note(
    journal: Journal, plan: ProtectionPlan | None, epoch: int, *, mixed: bool | None = None
) -> None:
    """Before anybody is told yes. ``epoch``: the highest that has been given to a record, which
    does not have the plan; no ``plan``: nothing is wanted any more. Raises JournalError.
    """
    found = journal.newest(_KIND)
    number = 1 if found is None else found[0] + 1
    values = None if plan is None else plan.to_dict()
    journal.write(_KIND, number, {"epoch": epoch, "plan": values, "mixed": mixed})


def newest(journal: Journal, newest_epoch: int) -> Wanted:
    """What was asked for last; the plan only if no record up to ``newest_epoch`` came after that.

    Raises JournalError.
    """
    found = journal.newest(_KIND)
    if found is None:
        return Wanted()
    values = found[1]
    plan = None
    if values["plan"] is not None and int(values["epoch"]) >= newest_epoch:
        plan = ProtectionPlan.from_dict(values["plan"])
    return Wanted(plan, values.get("mixed"))
