"""What a user has asked of the protection, kept for the coordinators that come later.

A plan is wanted until an epoch has it, which may be many iterations away, or until the run is
started again with settings of its own. What the run asks of itself is found out anew.
"""

from __future__ import annotations

from deadpool_megatron.cluster.journal.entries import Journal
from deadpool_megatron.layout.schemes import ProtectionPlan

WHY = "asked for by 'deadpool protect'"
_KIND = "plan"


def note(journal: Journal, plan: ProtectionPlan | None, epoch: int) -> None:
    """Before anybody is told yes. ``epoch``: the highest that has been given to a record, which
    does not have the plan; no ``plan``: nothing is wanted any more. Raises JournalError.
    """
    found = journal.newest(_KIND)
    number = 1 if found is None else found[0] + 1
    values = None if plan is None else plan.to_dict()
    journal.write(_KIND, number, {"epoch": epoch, "plan": values})


def newest(journal: Journal, newest_epoch: int) -> ProtectionPlan | None:
    """Return the plan that was asked for last; None if a record up to ``newest_epoch`` came after
    that, or nothing is wanted. Raises JournalError.
    """
    found = journal.newest(_KIND)
    if found is None or found[1]["plan"] is None or int(found[1]["epoch"]) < newest_epoch:
        return None
    return ProtectionPlan.from_dict(found[1]["plan"])
