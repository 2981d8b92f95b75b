"""Plans of protection that a user has asked for, kept until an epoch has them.

The next epoch may be many iterations away, and its coordinator another one than that which has said
yes. What the run asks of itself (cadence, mixed) is found out anew instead.
"""

from __future__ import annotations

from deadpool_megatron.cluster.journal import Journal
from deadpool_megatron.layout.schemes import ProtectionPlan

WHY = "asked for by 'deadpool protect'"
_KIND = "plan"


def note(journal: Journal, plan: ProtectionPlan, epoch: int) -> None:
    """Before anybody is told yes. ``epoch``: the highest that has been given to a record, which
    does not have the plan. Raises JournalError.
    """
    found = journal.newest(_KIND)
    number = 1 if found is None else found[0] + 1
    journal.write(_KIND, number, {"epoch": epoch, "plan": plan.to_dict()})


def still_wanted(journal: Journal, newest_epoch: int) -> ProtectionPlan | None:
    """The plan that was asked for last, unless records up to ``newest_epoch`` have come after that.

    Raises JournalError.
    """
    found = journal.newest(_KIND)
    if found is None or int(found[1]["epoch"]) < newest_epoch:
        return None
    return ProtectionPlan.from_dict(found[1]["plan"])
