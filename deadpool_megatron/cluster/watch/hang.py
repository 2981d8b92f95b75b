"""Verdicts on hangs from the beats of all roles: the culprits, the time limit without progress, and
the table of a hang. The table has the position of each role in each group in which a role waits. It
is for people and of bounded size; no decision depends on it. Pure.

A role that waits in a communication waits for another role. The culprit is a role that waits in no
communication. If all roles wait, it is the role with the lowest operation sequence number of a
group, or else with the fewest operations in total. If no role waits, the culprits are the roles in
the earliest iteration, provided that other roles have passed it.

Where operations run on a device (NCCL), the host does not wait in them once they are enqueued. A
role waits while its device has an operation pending, or while its host blocks in an enqueue, where
NCCL connects a pair at its first message. The culprit is then a role whose device has no work. If
there is none, it is a role that has not enqueued the collective in which the devices of its peers
are, or else a role whose device is known not to start that collective. Without such evidence no
role is named: the epoch is closed, which ends all communication, and the agent of a role that does
not leave the epoch replaces its process.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from deadpool_megatron.layout.descriptions import roles_in
from deadpool_megatron.layout.ranks import first_role
from deadpool_megatron.layout.records import BOUNDARIES
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.forms import Listed, read

# Sections whose limit is first_step_seconds instead of hang_seconds. Those of the boundaries are
# evaluations and saves.
LONG_SECTIONS = frozenset({"build", "first-step", "load", *BOUNDARIES[1:]})
# The section whose usual length is learned (HangLimit).
STEP = "step"
# A role in these sections is not expected to progress.
IDLE_SECTIONS = frozenset({"parked", "paused", "done"})
# With the time between two looks, a hang is found within three times the longest step.
_LIMIT_STEPS = 2.5
# Busy storage or a garbage collection is no hang, even in a run with fast steps.
_MIN_LIMIT_SECONDS = 20.0
_STEPS_BEFORE_TRUST = 5
MAX_GROUPS = 16  # in a table
MAX_ROLES = 64  # in each group of a table
_MAX_NAME_CHARACTERS = 200
# Operations that each role numbers for itself, so that numbers of different roles are unrelated.
MESSAGES = frozenset({"send", "recv", "recv_anysource"})


@dataclass(frozen=True)
class Entered(Listed):
    """The operation in which a role waits. ``sequence`` counts within the group."""

    group: str
    operation: str
    sequence: int


@dataclass(frozen=True)
class OnHost(Listed):
    """A group whose operations run without a device, so that the host waits in them: the numbers
    of collectives and of messages that the host has begun."""

    group: str
    collectives: int
    messages: int


@dataclass(frozen=True)
class OnDevice(Listed):
    """A group on a role's device: numbers of the operations that were enqueued, started and
    completed. ``collective``: whether an equal number means the same operation on all roles. If
    not, the group has messages, too, with a count of their own, and a number may be of either
    count. ``started``: None if unknown.
    """

    group: str
    enqueued: int
    started: int | None
    completed: int
    collective: bool

    @property
    def is_pending(self) -> bool:
        """Return whether the device has unfinished operations."""
        return self.enqueued != self.completed

    @property
    def is_inside(self) -> bool | None:
        """Return whether the device has started a pending operation; None if unknown."""
        if self.started is None or not self.collective:
            return None
        return self.started > self.completed


@dataclass(frozen=True)
class RoleStatus:
    """The last beat of a role. ``progress`` counts operations and iterations, and never decreases.
    ``device``: None if the host waits in operations, or if the role made progress recently.
    ``host``: empty if the role made progress recently.
    """

    section: str
    iteration: int
    waiting: Entered | None
    progress: int
    still_seconds: float
    device: tuple[OnDevice, ...] | None = None
    host: tuple[OnHost, ...] = ()

    @staticmethod
    def from_beat(beat: Mapping[str, Any], still_seconds: float) -> RoleStatus:
        """Return the status in the body of a beat. Raises KeyError, TypeError or ValueError for
        anything else."""
        more = {"still_seconds": still_seconds, "host": beat.get("begun", ())}
        return read(RoleStatus, {"waiting": None, **beat, **more})


@dataclass(frozen=True)
class Hang:
    """The verdict: roles that block the others (may be empty), a line with the reason, and the
    seconds without any progress.
    """

    culprits: tuple[int, ...]
    cause: str
    still_seconds: float


class ProgressClock:
    """The time of the last change of each role's beat, for ``still_seconds``. Reads no clock."""

    def __init__(self) -> None:
        # When each role's beat began to have its present section, iteration and progress.
        self._since: dict[tuple[int, str, int, int], float] = {}

    def update(self, beats: Mapping[int, Mapping[str, Any]], now: float) -> dict[int, RoleStatus]:
        """Return the statuses of roles in ``beats`` at time ``now`` (seconds); forget others."""
        statuses, since = {}, {}
        for role, beat in beats.items():
            mark = (role, str(beat["section"]), int(beat["iteration"]), int(beat["progress"]))
            since[mark] = self._since.get(mark, now)
            statuses[role] = RoleStatus.from_beat(beat, now - since[mark])
        self._since = since
        return statuses


def find_hang(
    statuses: Mapping[int, RoleStatus], settings: Settings, limit_seconds: float
) -> Hang | None:
    """Return a hang; None while any role progresses or all roles are idle. ``limit_seconds``: the
    limit of a step. The longest limit of the roles' sections counts, because all other roles may be
    waiting for the role in the long section.
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
    culprits, reason = _culprits_by_device(busy) if on_devices else _culprits(busy)
    return Hang(culprits, f"no progress of any role for {still:.1f} s: {reason}", still)


def _culprits(busy: Mapping[int, RoleStatus]) -> tuple[tuple[int, ...], str]:
    """Return the culprits and the reason, where hosts wait in operations themselves."""
    outside = {r: s for r, s in busy.items() if s.waiting is None}
    if outside:
        first = min(s.iteration for s in outside.values())
        roles = tuple(sorted(r for r, s in outside.items() if s.iteration == first))
        if len(roles) == len(busy) > 1:
            # Killing all of them would lose all state that the job has in its processes.
            return (), f"no role waits in a communication, all are in iteration {first}"
        reason = f"{_name(roles)} in section {outside[roles[0]].section} of iteration {first}"
        return roles, reason + _entered_by_others(busy)
    late: set[int] = set()
    operation = ""
    groups: dict[str, list[tuple[int, int]]] = {}
    for role, status in busy.items():
        assert status.waiting is not None
        groups.setdefault(status.waiting.group, []).append((status.waiting.sequence, role))
    for group, entered in groups.items():
        lowest, highest = min(entered)[0], max(entered)[0]
        if lowest < highest:
            late.update(role for sequence, role in entered if sequence == lowest)
            operation = operation or f"operation {highest} of group {group}"
    if not late:
        fewest = min(s.progress for s in busy.values())
        late = {r for r, s in busy.items() if s.progress == fewest}
        if len(late) == len(busy):
            return (), "every role waits in a communication, and none has begun fewer operations"
        operation = "what the others have entered"
    roles = tuple(sorted(late))
    inside = busy[roles[0]].waiting
    assert inside is not None
    return roles, (
        f"{_name(roles)} did not enter {operation}, but waits in operation {inside.sequence}"
        f" ({inside.operation}) of group {inside.group}"
    )


def _culprits_by_device(busy: Mapping[int, RoleStatus]) -> tuple[tuple[int, ...], str]:
    """Return the culprits and the reason, where operations run on devices."""
    known = {role: s.device for role, s in busy.items() if s.device is not None}
    pending = {role: [g for g in groups if g.is_pending] for role, groups in known.items()}
    if len(known) < len(busy):
        return (), "not every role reports the state of its device"
    outside = {role for role, groups in pending.items() if not groups}
    idle = tuple(sorted(role for role in outside if busy[role].waiting is None))
    if len(idle) == len(busy):
        return (), "no device has anything to do"
    if idle:
        first = min(busy[role].iteration for role in idle)
        roles = tuple(role for role in idle if busy[role].iteration == first)
        where = f"in section {busy[roles[0]].section} of iteration {first}"
        return roles, f"the device of {_name(roles)} has nothing to do, {where}; others wait"
    absent, operation = _absent({r: groups for r, groups in known.items() if r not in outside})
    if absent:
        return absent, f"{_name(absent)} did not enqueue {operation}, which others are in"
    inside = {role: {g.is_inside for g in groups} for role, groups in pending.items()}
    stuck = tuple(sorted(role for role, states in inside.items() if states == {False}))
    if stuck and any(True in states for states in inside.values()):
        return stuck, f"the device of {_name(stuck)} does not start what others are in"
    return (), "every device waits in a communication, and none has begun fewer operations"


def _absent(known: Mapping[int, tuple[OnDevice, ...]]) -> tuple[tuple[int, ...], str]:
    """Return the roles that have not enqueued a collective in which a peer's device is, and that
    operation. Roles that are themselves blocked, in a group where another role is missing, are
    omitted.
    """
    newest: dict[str, int] = {}
    for groups in known.values():
        for g in groups:
            if g.collective and g.is_pending:
                newest[g.group] = max(newest.get(g.group, 0), g.completed + 1)
    missing = {
        (role, g.group): None
        for role, groups in sorted(known.items())
        for g in groups
        if g.collective and g.enqueued < newest.get(g.group, 0)
    }
    names = {name for _, name in missing}
    # A role that waits in a group where another role is missing is blocked, and blocks other roles
    # only because of that.
    blocked = {
        role
        for role, groups in known.items()
        for g in groups
        if g.is_pending and g.group in names and (role, g.group) not in missing
    }
    roles = tuple(sorted({role for role, _ in missing} - blocked))
    if not roles:
        return (), ""
    group = next(group for role, group in missing if role == roles[0])
    return roles, f"operation {newest[group]} of group {group}"


def _entered_by_others(busy: Mapping[int, RoleStatus]) -> str:
    """Describe the operation in which most roles wait, which the culprits did not enter."""
    waiting = Counter(s.waiting for s in busy.values() if s.waiting is not None)
    if not waiting:
        return ""
    (inside, count), *_ = waiting.most_common(1)
    waits = "role waits" if count == 1 else "roles wait"
    return (
        f"; {count} {waits} in operation {inside.sequence} ({inside.operation})"
        f" of group {inside.group}"
    )


def _name(roles: tuple[int, ...]) -> str:
    return ("role " if len(roles) == 1 else "roles ") + ", ".join(map(str, roles))


class HangLimit:
    """The longest allowed time without progress: a small multiple of the longest step of this run.

    The limit that a user sets must hold for every model, so it is minutes; after some steps of a
    run, a hang can be found much sooner. Each look at all roles updates the limit; a new
    coordinator begins again. Not thread-safe.

    If several steps end between two looks, each took no longer than the time between the looks.
    """

    def __init__(self, settings: Settings) -> None:
        """``hang_seconds`` is the upper limit, and applies until enough steps are known."""
        self._hang_seconds = settings.hang_seconds
        # The loss of a node and a wait at the gate must be reported before they count as a hang.
        report = max(settings.node_silence_seconds, settings.gate_report_seconds)
        self._min_seconds = max(_MIN_LIMIT_SECONDS, 2 * report)
        self._longest = 0.0
        self._steps = 0
        self._iteration = -1
        self._size = 0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Return the limit in force."""
        if self._steps < _STEPS_BEFORE_TRUST:
            return self._hang_seconds
        return min(self._hang_seconds, max(self._min_seconds, _LIMIT_STEPS * self._longest))

    def look(self, statuses: Mapping[int, RoleStatus], now: float) -> None:
        """Take the statuses of all roles at the time ``now``. A step in which a role was in another
        section (evaluation, a save, the gate) is not measured; nor is the first step. After a
        change of the number of model replicas the measurement begins again, as steps with fewer
        replicas are longer.
        """
        # The number of a role encodes the number of model replicas (layout/ranks.py).
        size = first_role(min(statuses, default=0))
        if size != self._size:
            self._size, self._longest, self._steps = size, 0.0, 0
        iteration = max((status.iteration for status in statuses.values()), default=-1)
        usual = all(status.section == STEP for status in statuses.values())
        if not usual or iteration < self._iteration:
            self._since = None
        elif iteration > self._iteration:
            if self._since is not None:
                self._longest = max(self._longest, now - self._since)
                self._steps += iteration - self._iteration
            self._since = now
        self._iteration = iteration

    def note_hang(self, still_seconds: float) -> None:
        """Note that a hang was found after this time. The next step gets more than twice that time,
        as the step may have been only slow, for example because of storage.
        """
        self._longest = max(self._longest, still_seconds)
        self._since = None

    def forget_step(self) -> None:
        """Do not measure the present step, as the next look may be within a step of another
        epoch."""
        self._since = None


class Position(StrEnum):
    """The position of a role relative to its group, in the order of a table."""

    MISSING = "missing"  # the role has not begun the operation in which others wait
    NOT_STARTED = "not-started"  # it has begun, but its device is known not to have started it
    ELSEWHERE = "elsewhere"  # the role waits in no operation of this group
    WAITS = "waits"


@dataclass(frozen=True)
class GroupPlace:
    """The position of a role in a group, by numbers of operations from 1 in each epoch; None if
    unknown.

    ``operation``: the operation in which the role waits, if that differs from the operation of the
    furthest roles.
    """

    where: Position
    begun: int | None
    started: int | None = None
    ended: int | None = None
    operation: str = ""


@dataclass(frozen=True)
class _Facts:
    """The facts about a group in a role's beats."""

    waiting: Entered | None = None
    host: OnHost | None = None
    device: OnDevice | None = None

    @property
    def collective(self) -> Entered | None:
        """Return the collective in which the host waits."""
        is_message = self.waiting is not None and self.waiting.operation in MESSAGES
        return None if is_message else self.waiting

    @property
    def waits(self) -> bool:
        return self.waiting is not None or (self.device is not None and self.device.is_pending)


def table_of(statuses: Mapping[int, RoleStatus]) -> dict[str, Any]:
    """Return the data of a HANG event except its roles: ``groups`` in which a role waits, first
    those from which a role is missing, and the number of omitted groups (``left_out``)."""
    by_group: dict[str, dict[int, _Facts]] = defaultdict(dict)
    for role, status in statuses.items():
        for name, facts in _facts_by_group(status):
            by_group[name][role] = facts
    waiting = []
    for name, roles in sorted(by_group.items()):
        if any(facts.waits for facts in roles.values()):
            members = {role: _Facts() for role in roles_in(name, statuses)}
            waiting.append(_Group(name, {**members, **roles}))
    waiting.sort(key=lambda group: group.order)
    return {
        "groups": [group.to_dict() for group in waiting[:MAX_GROUPS]],
        "left_out": max(0, len(waiting) - MAX_GROUPS),
    }


class _Group:
    """A group in which a role waits."""

    def __init__(self, name: str, by_role: Mapping[int, _Facts]) -> None:
        self._name = name
        self._operation, self._number = _furthest(by_role.values())
        # Where devices are reported, the numbers of hosts are ignored, as they count differently.
        self._is_on_devices = any(facts.device is not None for facts in by_role.values())
        places: dict[GroupPlace, list[int]] = defaultdict(list)
        for role, facts in sorted(by_role.items()):
            places[self._place(facts)].append(role)
        order = list(Position)
        # Places with the fewest roles come first.
        self._rows = sorted(
            places.items(), key=lambda row: (len(row[1]), order.index(row[0].where), row[1])
        )

    @property
    def order(self) -> int:
        """Return the sort key of this group in the table; groups with a missing role have 0."""
        return min(list(Position).index(place.where) for place, _ in self._rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the form in an event."""
        rows, budget = [], MAX_ROLES
        shown = self._rows[:MAX_ROLES]
        for number, (place, roles) in enumerate(shown):
            # Each later row gets at least one role.
            listed = roles[: budget - (len(shown) - number - 1)]
            budget -= len(listed)
            facts = {key: value for key, value in asdict(place).items() if value not in (None, "")}
            rows.append({"roles": listed, **facts})
        return {
            "group": self._name[:_MAX_NAME_CHARACTERS],
            "operation": self._operation,
            "number": self._number,
            "rows": rows,
            "left_out": sum(len(roles) for _, roles in self._rows) - (MAX_ROLES - budget),
        }

    def _place(self, facts: _Facts) -> GroupPlace:
        device = facts.device
        return self._on_host(facts) if device is None else self._on_device(facts, device)

    def _on_device(self, facts: _Facts, device: OnDevice) -> GroupPlace:
        where = Position.ELSEWHERE
        if self._number is not None and device.enqueued < self._number:
            where = Position.MISSING
        elif facts.waits:  # a host may block in an operation that its device does not have yet
            has_not_started = device.is_pending and device.is_inside is False
            where = Position.NOT_STARTED if has_not_started else Position.WAITS
        return GroupPlace(where, device.enqueued, device.started, device.completed)

    def _on_host(self, facts: _Facts) -> GroupPlace:
        waiting = facts.waiting
        where = Position.ELSEWHERE if waiting is None else Position.WAITS
        operation = "" if waiting is None else waiting.operation
        if self._is_on_devices:
            return GroupPlace(where, None, operation=operation)
        begun = None if facts.host is None else facts.host.collectives
        if self._number is None:  # a group of messages
            begun = None if facts.host is None else facts.host.messages
        if begun is None and waiting is not None and (facts.collective or self._number is None):
            begun = waiting.sequence
        if self._number is not None and begun is not None and begun < self._number:
            where = Position.MISSING
        return GroupPlace(where, begun, operation="" if operation == self._operation else operation)


def _facts_by_group(status: RoleStatus) -> Iterable[tuple[str, _Facts]]:
    hosts = {host.group: host for host in status.host}
    devices = {device.group: device for device in status.device or ()}
    waiting = status.waiting
    entered = {} if waiting is None else {waiting.group: waiting}
    for group in hosts.keys() | devices.keys() | entered.keys():
        yield group, _Facts(entered.get(group), hosts.get(group), devices.get(group))


def _furthest(facts: Iterable[_Facts]) -> tuple[str, int | None]:
    """Return name, if known, and number of the collective in which the furthest roles wait. For
    messages, which each role numbers for itself, return only the name."""
    roles = list(facts)
    devices = [role.device for role in roles if role.device is not None]
    hosts = [role.collective for role in roles if role.collective is not None]
    numbers = [entered.sequence for entered in hosts]
    if devices:
        comparable = all(device.collective for device in devices)
        pending = [device.completed + 1 for device in devices if device.is_pending]
        hosts, numbers = [], pending if comparable else []
    number = max(numbers, default=None)
    if number is None:
        entered = [role.waiting for role in roles if role.waiting is not None]
    else:
        entered = [host for host in hosts if host.sequence == number]
    names = Counter(waiting.operation for waiting in entered).most_common(1)
    return (names[0][0] if names else ""), number
