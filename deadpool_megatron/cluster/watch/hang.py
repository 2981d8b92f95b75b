"""The role that hangs, and in what, from the beats of all roles; and how long nothing may move
before that is a hang. Pure.

A role that waits in a communication waits for somebody. The culprit is the role that does not wait
in any, or, when all wait, the one that is behind: lowest operation sequence number of the group,
else fewest operations in all. When none waits, the ones of the earliest iteration, if others have
continued.

Where operations run on a device (NCCL), the host waits in none of them once they are enqueued: a
role waits as long as its device has one pending, or its host stands in one that it enqueues, where
NCCL connects a pair at its first message. The culprit is then the role whose device has nothing to
do, or has not been given the collective that its peers are in, or, where that is known, has it and
does not come to start any. Without such evidence nobody is named: the epoch is closed, which ends
all communication, and who does not leave it then is replaced by its agent.
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
# The section whose usual length is learned (HangLimit).
STEP = "step"
# A role in one of these is not expected to progress.
IDLE_SECTIONS = frozenset({"parked", "paused", "done"})
# With the time between two looks, a hang is found within three of the longest steps.
_LIMIT_STEPS = 2.5
# Busy storage, or a collection of garbage, is no hang of a run whose steps are fast.
_LEAST_LIMIT_SECONDS = 20.0
_STEPS_BEFORE_TRUST = 5


@dataclass(frozen=True)
class Waiting:
    """A communication a role has entered and not left. ``sequence`` counts within the group."""

    group: str
    operation: str
    sequence: int


@dataclass(frozen=True)
class OnHost:
    """A group in which the host of one role itself waits: how many collectives, and how many
    messages, it has begun."""

    group: str
    collectives: int
    messages: int


@dataclass(frozen=True)
class OnDevice:
    """A group on the device of one role: numbers of the operations that were enqueued, started and
    completed. ``collective``: the same number is the same operation on all roles; else collectives
    and messages are counted apart, and a number may be that of either. ``started``: None where it
    is not known.
    """

    group: str
    enqueued: int
    started: int | None
    completed: int
    collective: bool

    @property
    def is_pending(self) -> bool:
        """Return whether the device is not through with what it was given."""
        return self.enqueued != self.completed

    @property
    def is_inside(self) -> bool | None:
        """Return whether the device is in what is pending; None: it is not known."""
        if self.started is None or not self.collective:
            return None
        return self.started > self.completed


@dataclass(frozen=True)
class RoleStatus:
    """One role's last beat. ``progress`` counts operations and iterations, and never goes back.
    ``device``: None where the host waits in operations, or the role has not stood still for long.
    ``host``: empty where it has not.
    """

    section: str
    iteration: int
    waiting: Waiting | None
    progress: int
    still_seconds: float
    device: tuple[OnDevice, ...] | None = None
    host: tuple[OnHost, ...] = ()

    @staticmethod
    def from_beat(beat: Mapping[str, Any], still_seconds: float) -> RoleStatus:
        """From the body of a beat. Raises KeyError, TypeError or ValueError for anything else."""
        waiting, on_device, device = beat.get("waiting"), beat.get("device"), None
        if waiting is not None:
            waiting = Waiting(str(waiting[0]), str(waiting[1]), int(waiting[2]))
        if on_device is not None:
            device = tuple(
                OnDevice(
                    str(group),
                    int(given),
                    None if begun is None else int(begun),
                    int(done),
                    bool(same),
                )
                for group, given, begun, done, same in on_device
            )
        host = tuple(OnHost(str(group), int(c), int(m)) for group, c, m in beat.get("begun", ()))
        section, numbers = str(beat["section"]), (int(beat["iteration"]), int(beat["progress"]))
        return RoleStatus(section, numbers[0], waiting, numbers[1], still_seconds, device, host)


def _number(told: Any) -> int | None:
    return None if told is None else int(told)


@dataclass(frozen=True)
class Hang:
    """The verdict: roles that hold the others up (may be empty), one line that says how, and for
    how long nothing has moved.
    """

    culprits: tuple[int, ...]
    cause: str
    still_seconds: float


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


def find_hang(
    statuses: Mapping[int, RoleStatus], settings: Settings, limit_seconds: float
) -> Hang | None:
    """None while any role moves or all are idle. ``limit_seconds`` is that of a step; the longest
    limit of the roles' sections counts, because the others may be waiting for the role that is in
    the long section.
    """
    busy = {r: s for r, s in statuses.items() if s.section not in IDLE_SECTIONS}
    if not busy:
        return None
    limits = {STEP: limit_seconds, **dict.fromkeys(LONG_SECTIONS, settings.first_step_seconds)}
    limit = max(limits.get(s.section, settings.hang_seconds) for s in busy.values())
    still = min(s.still_seconds for s in statuses.values())
    if still <= limit:
        return None
    on_devices = any(status.device is not None for status in busy.values())
    culprits, how = _culprits_by_device(busy) if on_devices else _culprits(busy)
    return Hang(culprits, f"no progress of any role for {still:.1f} s: {how}", still)


def _culprits(busy: Mapping[int, RoleStatus]) -> tuple[tuple[int, ...], str]:
    outside = {r: s for r, s in busy.items() if s.waiting is None}
    if outside:
        first = min(s.iteration for s in outside.values())
        roles = tuple(sorted(r for r, s in outside.items() if s.iteration == first))
        if len(roles) == len(busy) > 1:
            # To kill all of them would cost all that the job has in its processes.
            return (), f"no role waits in a communication, all are in iteration {first}"
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


def _culprits_by_device(busy: Mapping[int, RoleStatus]) -> tuple[tuple[int, ...], str]:
    known = {role: s.device for role, s in busy.items() if s.device is not None}
    pending = {role: [one for one in on if one.is_pending] for role, on in known.items()}
    if len(known) < len(busy):
        return (), "not every role tells what its device does"
    outside = {role for role, on in pending.items() if not on}
    idle = tuple(sorted(role for role in outside if busy[role].waiting is None))
    if len(idle) == len(busy):
        return (), "no device has anything to do"
    if idle:
        first = min(busy[role].iteration for role in idle)
        roles = tuple(role for role in idle if busy[role].iteration == first)
        where = f"in section {busy[roles[0]].section} of iteration {first}"
        return roles, f"the device of {_name(roles)} has nothing to do, {where}; others wait"
    absent, missed = _absent({role: on for role, on in known.items() if role not in outside})
    if absent:
        return absent, f"{_name(absent)} did not enqueue {missed}, which others are in"
    inside = {role: {one.is_inside for one in on} for role, on in pending.items()}
    stuck = tuple(sorted(role for role, found in inside.items() if found == {False}))
    if stuck and any(True in found for found in inside.values()):
        return stuck, f"the device of {_name(stuck)} does not start what others are in"
    return (), "every device waits in a communication, none is behind the others"


def _absent(known: Mapping[int, tuple[OnDevice, ...]]) -> tuple[tuple[int, ...], str]:
    """Roles that were not given a collective which a peer's device is in, and wait in no group
    for somebody who is missing there; the operation.
    """
    newest: dict[str, int] = {}
    for on in known.values():
        for one in on:
            if one.collective and one.is_pending:
                newest[one.group] = max(newest.get(one.group, 0), one.completed + 1)
    missing: dict[int, str] = {}
    for role, on in sorted(known.items()):
        for one in on:
            if one.collective and one.enqueued < newest.get(one.group, 0):
                missing.setdefault(role, one.group)
    groups = set(missing.values())
    # Who waits in a group where somebody is missing is held up, and holds others up by that only.
    held = {
        role
        for role, on in known.items()
        for one in on
        if one.is_pending
        and one.group in groups
        and not (one.collective and one.enqueued < newest[one.group])
    }
    roles = tuple(sorted(missing.keys() - held))
    if not roles:
        return (), ""
    group = missing[roles[0]]
    return roles, f"operation {newest[group]} of group {group}"


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


class HangLimit:
    """The time in which nothing may move: a small multiple of the steps of this run.

    The limit that a user sets must hold for every model, so it is minutes; a run that has been seen
    for some steps tells much sooner that something is wrong. Learns from each look at all roles;
    not thread-safe. A new coordinator learns again.

    Of several steps between two looks none took longer than what lies between the looks.
    """

    def __init__(self, settings: Settings) -> None:
        """``hang_seconds`` is the limit that is never exceeded, and holds until enough is known."""
        self._hang_seconds = settings.hang_seconds
        # A lost node is no hang, and a wait at the gate is told before it could be one.
        early = max(settings.node_silence_seconds, settings.gate_report_seconds)
        self._least_seconds = max(_LEAST_LIMIT_SECONDS, 2 * early)
        self._longest = 0.0
        self._seen = 0
        self._iteration = -1
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """The limit in force."""
        if self._seen < _STEPS_BEFORE_TRUST:
            return self._hang_seconds
        return min(self._hang_seconds, max(self._least_seconds, _LIMIT_STEPS * self._longest))

    def look(self, statuses: Mapping[int, RoleStatus], now: float) -> None:
        """Take what all roles do at the time ``now``. A step in which a role was seen in another
        section (evaluation, a save, the gate) tells nothing; nor does the one it began with.
        """
        iteration = max((status.iteration for status in statuses.values()), default=-1)
        usual = all(status.section == STEP for status in statuses.values())
        if not usual or iteration < self._iteration:
            self._since = None
        elif iteration > self._iteration:
            if self._since is not None:
                self._longest = max(self._longest, now - self._since)
                self._seen += iteration - self._iteration
            self._since = now
        self._iteration = iteration

    def was_reached(self, still_seconds: float) -> None:
        """A hang was found after so long. Where it was none, but something slow, as storage can be,
        the next one is given more than twice the time.
        """
        self._longest = max(self._longest, still_seconds)
        self._since = None

    def forget_step(self) -> None:
        """Forget the step: what comes next does not begin where one does, in another epoch."""
        self._since = None
