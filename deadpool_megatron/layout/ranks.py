"""Role numbers, which encode a rank and how many model replicas the run lacks. Pure.

In a run that continues with fewer model replicas, the number of a role is its rank plus
:data:`SIZE_STEP` for each missing replica. Segments, copies, layouts, seals and templates are
identified by role numbers, so data of different sizes never mix. At full size, role and rank are
equal.
"""

from __future__ import annotations

SIZE_STEP = 1_000_000


def rank_of(role: int) -> int:
    """Return the rank of a role, in the run of its size."""
    return role % SIZE_STEP


def first_role(role: int) -> int:
    """Return the role of rank 0, in the run of the size of ``role``."""
    return role - rank_of(role)
