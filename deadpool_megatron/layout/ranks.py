"""The number of a role: its rank, and how many model replicas the run lacks.

A run that continues with fewer model replicas has roles with other numbers: missing replicas times
:data:`SIZE_STEP`, plus the rank. So segments, copies, layouts, seals and templates, which are known
by the number of a role, never mix with those of another size. At full size role and rank are equal.
Pure.
"""

from __future__ import annotations

SIZE_STEP = 1_000_000


def rank_of(role: int) -> int:
    """Return the rank of a role, in the run of its size."""
    return role % SIZE_STEP


def first_role(role: int) -> int:
    """Return the role of rank 0, in the run of the size of ``role``."""
    return role - rank_of(role)
