"""Verdicts on hangs from the beats of all roles: the culprits, the time limit without progress, and
the table of a hang. The table has the place of each role in each group in which a role waits:
diagnostics for people, of bounded size; no decision depends on it. Pure.

A role that waits in a communication waits for another role. The culprit is a role that waits in no
communication. If all roles wait, it is the role with the lowest operation sequence number of a
group, or else with the fewest operations in total. If no role waits, the culprits are the roles in
the earliest iteration, if others have continued.

Where operations run on a device (NCCL), the host does not wait in them once they are enqueued. A
role waits while its device has an operation pending, or while its host blocks in an enqueue, where
NCCL connects a pair at its first message. The culprit is then a role whose device has no work, or
was not given the collective that its peers are in, or, where that is known, was given it but does
not start any operation. Without such evidence no role is named: the epoch is closed, which ends all
communication, and a role that does not leave the epoch is replaced by its agent.
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

# Sections that have first_step_seconds instead of hang_seconds.
LONG_SECTIONS = frozenset({"build", "first-step", "load", *BOUNDARIES[1:]})
# The section whose usual length is learned (HangLimit).
STEP = "step"
# A role in these sections is not expected to progress.
IDLE_SECTIONS = frozenset({"parked", "paused", "done"})
# Including the time between two looks, a hang is found within three of the longest steps.
_LIMIT_STEPS = 2.5
# Busy storage or a garbage collection is no hang, even of a run with fast steps.
_MIN_LIMIT_SECONDS = 20.0
_STEPS_BEFORE_TRUST = 5
# In a table.
MAX_GROUPS = 16
# In a group of a table.
MAX_ROLES = 64
_MAX_NAME_CHARACTERS = 200
# Operations that each role numbers for itself, so that numbers of different roles do not compare.
MESSAGES = frozenset({"send", "recv", "recv_anysource"})


@dataclass(frozen=True)
class Entered(Listed):
    """Communication that a role has entered and not left. ``sequence`` counts within the group."""

    group: str
    operation: str
    sequence: int


@dataclass(frozen=True)
class OnHost(Listed):
    """A group in which a role's host itself waits: the numbers of collectives and of messages that
    it has begun."""

    group: str
    collectives: int
    messages: int


@dataclass(frozen=True)
class OnDevice(Listed):
    """A group on a role's device: numbers of the operations that were enqueued, started and
    completed. ``collective``: the same number is the same operation on all roles; otherwise
    collectives and messages are counted separately, and a number may be of either. ``started``:
    None if unknown.
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
        """Return whether the device has started a pending operation; None: unknown."""
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
        """Read the body of a beat. Raises KeyError, TypeError or ValueError for anything else."""
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
    """The time of the last change of each role's beat, for the statuses. Reads no clock."""

    def __init__(self) -> None:
        # When each role's beat began to have its present section, iteration and progress.
        self._since: dict[tuple[int, str, int, int], float] = {}

    def update(self, beats: Mapping[int, Mapping[str, Any]], now: float) -> dict[int, RoleStatus]:
        """Return the statuses of roles in ``beats`` at time ``now`` (seconds); forget others."""
        statuses, known = {}, {}
        for role, beat in beats.items():
            mark = (role, str(beat["section"]), int(beat["iteration"]), int(beat["progress"]))
            known[mark] = self._since.get(mark, now)
            statuses[role] = RoleStatus.from_beat(beat, now - known[mark])
        self._since = known
        return statuses


def find_hang(
    statuses: Mapping[int, RoleStatus], settings: Settings, limit_seconds: float
) -> Hang | None:
    """Return a hang; None while any role progresses or all are idle. ``limit_seconds``: the limit
    of a step. The longest limit of the roles' sections counts, because the others may be waiting
    for the role in the long section.
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
            # Killing all of them would lose all state that the job has in its processes.
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
            return (), "every role waits in a communication, and none has begun fewer operations"
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
    pending = {role: [device for device in on if device.is_pending] for role, on in known.items()}
    if len(known) < len(busy):
        return (), "not every role reports the state of its device"
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
    inside = {role: {device.is_inside for device in on} for role, on in pending.items()}
    stuck = tuple(sorted(role for role, found in inside.items() if found == {False}))
    if stuck and any(True in found for found in inside.values()):
        return stuck, f"the device of {_name(stuck)} does not start what others are in"
    return (), "every device waits in a communication, and none has begun fewer operations"


def _absent(known: Mapping[int, tuple[OnDevice, ...]]) -> tuple[tuple[int, ...], str]:
    """Return the roles that were not given the collective of a peer's device, and are not
    themselves held up in a group where another role is missing; and the operation.
    """
    newest: dict[str, int] = {}
    for on in known.values():
        for device in on:
            if device.collective and device.is_pending:
                newest[device.group] = max(newest.get(device.group, 0), device.completed + 1)
    missing = {
        (role, device.group): None
        for role, on in sorted(known.items())
        for device in on
        if device.collective and device.enqueued < newest.get(device.group, 0)
    }
    groups = {group for _, group in missing}
    # A role in a group where another role is missing is held up, and only thereby blocks others.
    held = {
        role
        for role, on in known.items()
        for device in on
        if device.is_pending and device.group in groups and (role, device.group) not in missing
    }
    roles = tuple(sorted({role for role, _ in missing} - held))
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
    """The longest time without progress: a small multiple of the steps of this run.

    The limit that a user sets must hold for every model, so it is minutes; after some steps of a
    run, a hang can be found much sooner. Learns from each look at all roles; not thread-safe. A new
    coordinator learns again.

    If several steps end between two looks, each took no longer than the time between the looks.
    """

    def __init__(self, settings: Settings) -> None:
        """``hang_seconds`` is the upper limit, and applies until enough steps are known."""
        self._hang_seconds = settings.hang_seconds
        # A lost node is no hang, and a wait at the gate is reported before it can become a hang.
        early = max(settings.node_silence_seconds, settings.gate_report_seconds)
        self._min_seconds = max(_MIN_LIMIT_SECONDS, 2 * early)
        self._longest = 0.0
        self._seen = 0
        self._iteration = -1
        self._size = 0
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """Return the limit in force."""
        if self._seen < _STEPS_BEFORE_TRUST:
            return self._hang_seconds
        return min(self._hang_seconds, max(self._min_seconds, _LIMIT_STEPS * self._longest))

    def look(self, statuses: Mapping[int, RoleStatus], now: float) -> None:
        """Take the statuses of all roles at the time ``now``. A step in which a role was in another
        section (evaluation, a save, the gate) is not measured; nor is the first step. Steps with
        fewer model replicas are longer: with another number of them it learns again.
        """
        size = first_role(min(statuses, default=0))
        if size != self._size:
            self._size, self._longest, self._seen = size, 0.0, 0
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

    def note_hang(self, still_seconds: float) -> None:
        """Note that a hang was found after this time. If it was only slow, as storage can be, the
        next step gets more than twice the time.
        """
        self._longest = max(self._longest, still_seconds)
        self._since = None

    def forget_step(self) -> None:
        """Forget the present step, as the next look may be in another epoch, within a step."""
        self._since = None


class Position(StrEnum):
    """The place of a role, as its group sees it; in the order of a table."""

    MISSING = "missing"  # it has not begun the operation in which others wait
    NOT_STARTED = "not-started"  # it has, but its device is known to be busy with something else
    ELSEWHERE = "elsewhere"  # it waits in no operation of this group
    WAITS = "waits"


@dataclass(frozen=True)
class GroupPlace:
    """The place of a role in a group, by numbers of operations from 1 in each epoch; None: unknown.

    ``operation``: the operation in which it waits, if that differs from the furthest roles'.
    """

    where: Position
    begun: int | None
    started: int | None = None
    ended: int | None = None
    operation: str = ""


@dataclass(frozen=True)
class _Known:
    """Content of a role's beats about a group."""

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
    by_group: dict[str, dict[int, _Known]] = defaultdict(dict)
    for role, status in statuses.items():
        for name, known in _known_by_group(status):
            by_group[name][role] = known
    found = []
    for name, roles in sorted(by_group.items()):
        if any(known.waits for known in roles.values()):
            members = {role: _Known() for role in roles_in(name, statuses)}
            found.append(_Group(name, {**members, **roles}))
    # If every role is waiting, there is no culprit.
    found.sort(key=lambda group: group.order)
    return {
        "groups": [group.to_dict() for group in found[:MAX_GROUPS]],
        "left_out": max(0, len(found) - MAX_GROUPS),
    }


class _Group:
    """A group in which a role waits."""

    def __init__(self, name: str, known: Mapping[int, _Known]) -> None:
        self._name = name
        self._operation, self._number = _furthest(known.values())
        # Hosts number operations in another way than the recorders of devices.
        self._is_on_devices = any(role.device is not None for role in known.values())
        places: dict[GroupPlace, list[int]] = defaultdict(list)
        for role, facts in sorted(known.items()):
            places[self._place(facts)].append(role)
        order = list(Position)
        # Places with the fewest roles come first.
        self._rows = sorted(
            places.items(), key=lambda row: (len(row[1]), order.index(row[0].where), row[1])
        )

    @property
    def order(self) -> int:
        """Return the place of this group in the table: 0 is the first."""
        return min(list(Position).index(place.where) for place, _ in self._rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the form in an event."""
        rows, left = [], MAX_ROLES
        shown = self._rows[:MAX_ROLES]
        for number, (place, roles) in enumerate(shown):
            # Each row shows at least one role, however many roles the rows before it have.
            kept = roles[: left - (len(shown) - number - 1)]
            left -= len(kept)
            facts = {key: value for key, value in asdict(place).items() if value not in (None, "")}
            rows.append({"roles": kept, **facts})
        return {
            "group": self._name[:_MAX_NAME_CHARACTERS],
            "operation": self._operation,
            "number": self._number,
            "rows": rows,
            "left_out": sum(len(roles) for _, roles in self._rows) - (MAX_ROLES - left),
        }

    def _place(self, known: _Known) -> GroupPlace:
        device = known.device
        return self._on_host(known) if device is None else self._on_device(known, device)

    def _on_device(self, known: _Known, device: OnDevice) -> GroupPlace:
        where = Position.ELSEWHERE
        if self._number is not None and device.enqueued < self._number:
            where = Position.MISSING
        elif known.waits:  # a host may block in an operation that its device does not have yet
            is_behind = device.is_pending and device.is_inside is False
            where = Position.NOT_STARTED if is_behind else Position.WAITS
        return GroupPlace(where, device.enqueued, device.started, device.completed)

    def _on_host(self, known: _Known) -> GroupPlace:
        waiting = known.waiting
        where = Position.ELSEWHERE if waiting is None else Position.WAITS
        operation = "" if waiting is None else waiting.operation
        if self._is_on_devices:
            return GroupPlace(where, None, operation=operation)
        begun = None if known.host is None else known.host.collectives
        if self._number is None:  # a group of messages
            begun = None if known.host is None else known.host.messages
        if begun is None and waiting is not None and (known.collective or self._number is None):
            begun = waiting.sequence
        if self._number is not None and begun is not None and begun < self._number:
            where = Position.MISSING
        return GroupPlace(where, begun, operation="" if operation == self._operation else operation)


def _known_by_group(status: RoleStatus) -> Iterable[tuple[str, _Known]]:
    hosts = {host.group: host for host in status.host}
    devices = {device.group: device for device in status.device or ()}
    waiting = status.waiting
    entered = {} if waiting is None else {waiting.group: waiting}
    for group in hosts.keys() | devices.keys() | entered.keys():
        yield group, _Known(entered.get(group), hosts.get(group), devices.get(group))


def _furthest(known: Iterable[_Known]) -> tuple[str, int | None]:
    """Return the collective in which the furthest roles wait: its name, if known, and its number;
    for messages, which each role numbers for itself, only the name."""
    roles = list(known)
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
