"""Which role hangs, and in what, from the beats of all roles: a pure function.

A role that waits in a communication waits for somebody. The culprit is the role that does not wait
in any, or, when all wait, the one that is behind: lowest operation sequence number of the group,
else fewest operations in all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.layout.records import BOUNDARIES
from deadpool_megatron.settings import Settings

# Sections that have first_step_seconds instead of hang_seconds.
LONG_SECTIONS = frozenset({"build", "first-step", "load", *BOUNDARIES[1:]})
# A role in one of these is not expected to progress.
IDLE_SECTIONS = frozenset({"parked", "paused", "done"})


@dataclass(frozen=True)
class Waiting:
    """A communication a role has entered and not left. ``sequence`` counts within the group."""

    group: str
    operation: str
    sequence: int


@dataclass(frozen=True)
class RoleStatus:
    """One role's last beat. ``progress`` counts operations and iterations, and never goes back."""

    section: str
    iteration: int
    waiting: Waiting | None
    progress: int
    still_seconds: float

    @staticmethod
    def from_beat(beat: Mapping[str, Any], still_seconds: float) -> RoleStatus:
        """From the body of a beat. Raises KeyError, TypeError or ValueError for anything else."""
        waiting = beat.get("waiting")
        return RoleStatus(
            section=str(beat["section"]),
            iteration=int(beat["iteration"]),
            waiting=None
            if waiting is None
            else Waiting(str(waiting[0]), str(waiting[1]), int(waiting[2])),
            progress=int(beat["progress"]),
            still_seconds=still_seconds,
        )


@dataclass(frozen=True)
class Hang:
    """The verdict: roles that hold the others up (may be empty), and one line that says how."""

    culprits: tuple[int, ...]
    cause: str


class ProgressClock:
    """Turns beats into statuses: remembers when each role's beat last changed. Pure of clocks."""

    def __init__(self) -> None:
        self._changed: dict[int, tuple[tuple[str, int, int], float]] = {}

    def update(self, beats: Mapping[int, Mapping[str, Any]], now: float) -> dict[int, RoleStatus]:
        """Statuses of the roles in ``beats`` at time ``now`` (seconds); others are forgotten."""
        statuses = {}
        changed = {}
        for role, beat in beats.items():
            mark = (str(beat["section"]), int(beat["iteration"]), int(beat["progress"]))
            before = self._changed.get(role)
            since = before[1] if before is not None and before[0] == mark else now
            changed[role] = (mark, since)
            statuses[role] = RoleStatus.from_beat(beat, now - since)
        self._changed = changed
        return statuses


def find_hang(statuses: Mapping[int, RoleStatus], settings: Settings) -> Hang | None:
    """None while any role moves or all are idle; the longest limit of the roles' sections counts,
    because the others may be waiting for the role that is in the long section.
    """
    busy = {r: s for r, s in statuses.items() if s.section not in IDLE_SECTIONS}
    if not busy:
        return None
    limit = max(
        settings.first_step_seconds if s.section in LONG_SECTIONS else settings.hang_seconds
        for s in busy.values()
    )
    still = min(s.still_seconds for s in statuses.values())
    if still <= limit:
        return None
    culprits, how = _culprits(busy)
    return Hang(culprits, f"no progress of any role for {still:.1f} s: {how}")


def _culprits(busy: Mapping[int, RoleStatus]) -> tuple[tuple[int, ...], str]:
    outside = {r: s for r, s in busy.items() if s.waiting is None}
    if outside:
        first = min(s.iteration for s in outside.values())
        roles = tuple(sorted(r for r, s in outside.items() if s.iteration == first))
        how = f"{_name(roles)} in section {outside[roles[0]].section} of iteration {first}"
        return roles, how + _entered_by_others(busy)
    behind: set[int] = set()
    missed = ""
    groups: dict[str, list[tuple[int, int]]] = {}
    for role, status in busy.items():
        assert status.waiting is not None
        groups.setdefault(status.waiting.group, []).append((status.waiting.sequence, role))
    for group, entered in groups.items():
        lowest, highest = min(entered)[0], max(entered)[0]
        if lowest < highest:
            behind.update(role for sequence, role in entered if sequence == lowest)
            missed = missed or f"operation {highest} of group {group}"
    if not behind:
        fewest = min(s.progress for s in busy.values())
        behind = {r for r, s in busy.items() if s.progress == fewest}
        if len(behind) == len(busy):
            return (), "every role waits in a communication, none is behind the others"
        missed = "what the others have entered"
    roles = tuple(sorted(behind))
    inside = busy[roles[0]].waiting
    assert inside is not None
    return roles, (
        f"{_name(roles)} did not enter {missed}, but waits in operation {inside.sequence}"
        f" ({inside.operation}) of group {inside.group}"
    )


def _entered_by_others(busy: Mapping[int, RoleStatus]) -> str:
    """The operation most roles wait in: what the culprits did not enter."""
    waits = Counter(s.waiting for s in busy.values() if s.waiting is not None)
    if not waits:
        return ""
    (inside, count), *_ = waits.most_common(1)
    who = "role waits" if count == 1 else "roles wait"
    return (
        f"; {count} {who} in operation {inside.sequence} ({inside.operation})"
        f" of group {inside.group}"
    )


def _name(roles: tuple[int, ...]) -> str:
    return ("role " if len(roles) == 1 else "roles ") + ", ".join(map(str, roles))
