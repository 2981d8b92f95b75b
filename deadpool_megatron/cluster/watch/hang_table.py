"""The place of each role when nothing moves: for each group somebody waits in, how far all are.

Evidence for people, made once for a hang, and of bounded size: nothing is decided from it. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from deadpool_megatron.cluster.watch.hang import OnDevice, OnHost, RoleStatus, Waiting
from deadpool_megatron.layout.words import roles_in

MOST_GROUPS = 16
# Of each group.
MOST_ROLES = 64
_MOST_NAME_CHARACTERS = 200
# Operations that each role numbers for itself, so that a number says nothing about another role.
MESSAGES = frozenset({"send", "recv", "recv_anysource"})


class Where(StrEnum):
    """The place of a role, as its group sees it; in the order of a table."""

    MISSING = "missing"  # it has not begun the operation that others wait in
    NOT_STARTED = "not-started"  # it has, and its device is known to be busy with something else
    ELSEWHERE = "elsewhere"  # it waits in none of this group
    WAITS = "waits"


@dataclass(frozen=True)
class Place:
    """Of one role in one group, by numbers of operations from 1 in each epoch; None: not known.

    ``operation``: what it waits in, where that is not what the furthest ones wait in.
    """

    where: Where
    begun: int | None
    started: int | None = None
    ended: int | None = None
    operation: str = ""


@dataclass(frozen=True)
class _Known:
    """Words of the beats of one role on one group."""

    waiting: Waiting | None = None
    host: OnHost | None = None
    device: OnDevice | None = None

    @property
    def collective(self) -> Waiting | None:
        """The collective in which the host waits."""
        return None if self.waiting is None or _is_message(self.waiting) else self.waiting

    @property
    def waits(self) -> bool:
        return self.waiting is not None or (self.device is not None and self.device.is_pending)


def table_of(statuses: Mapping[int, RoleStatus]) -> dict[str, Any]:
    """The data of a HANG event, but for its roles: ``groups`` that somebody waits in, those first
    where somebody is not, and how many more there are (``left_out``)."""
    by_group: dict[str, dict[int, _Known]] = defaultdict(dict)
    for role, status in statuses.items():
        for name, known in _known_by_group(status):
            by_group[name][role] = known
    found = []
    for name, roles in sorted(by_group.items()):
        if any(known.waits for known in roles.values()):
            members = {role: _Known() for role in roles_in(name, statuses)}
            found.append(_Group(name, {**members, **roles}))
    # Where everybody waits, nobody is to be looked for.
    found.sort(key=lambda group: group.order)
    return {
        "groups": [group.to_dict() for group in found[:MOST_GROUPS]],
        "left_out": max(0, len(found) - MOST_GROUPS),
    }


class _Group:
    """One group that somebody waits in."""

    def __init__(self, name: str, known: Mapping[int, _Known]) -> None:
        self._name = name
        self._operation, self._number = _furthest(known.values())
        # Hosts number what they begin in another way than the recorders of devices.
        self._is_on_devices = any(one.device is not None for one in known.values())
        places: dict[Place, list[int]] = defaultdict(list)
        for role, one in sorted(known.items()):
            places[self._place(one)].append(role)
        order = list(Where)
        # Those that differ from most come first.
        self._rows = sorted(
            places.items(), key=lambda row: (len(row[1]), order.index(row[0].where), row[1])
        )

    @property
    def order(self) -> int:
        """The place of this group in the table: 0 is the first."""
        return min(list(Where).index(place.where) for place, _ in self._rows)

    def to_dict(self) -> dict[str, Any]:
        """As it stands in an event."""
        rows, room = [], MOST_ROLES
        shown = self._rows[:MOST_ROLES]
        for number, (place, roles) in enumerate(shown):
            # Each row shows who is in it, however many there are in the rows before it.
            kept = roles[: room - (len(shown) - number - 1)]
            room -= len(kept)
            told = {key: value for key, value in asdict(place).items() if value not in (None, "")}
            rows.append({"roles": kept, **told})
        return {
            "group": self._name[:_MOST_NAME_CHARACTERS],
            "operation": self._operation,
            "number": self._number,
            "rows": rows,
            "left_out": sum(len(roles) for _, roles in self._rows) - (MOST_ROLES - room),
        }

    def _place(self, known: _Known) -> Place:
        return self._on_host(known) if known.device is None else self._on_device(known.device)

    def _on_device(self, device: OnDevice) -> Place:
        where = Where.ELSEWHERE
        if self._number is not None and device.enqueued < self._number:
            where = Where.MISSING
        elif device.is_pending:
            where = Where.NOT_STARTED if device.is_inside is False else Where.WAITS
        return Place(where, device.enqueued, device.started, device.completed)

    def _on_host(self, known: _Known) -> Place:
        waiting = known.waiting
        if self._is_on_devices:
            where = Where.ELSEWHERE if waiting is None else Where.WAITS
            return Place(where, None, operation="" if waiting is None else waiting.operation)
        begun = None if known.host is None else known.host.collectives
        if self._number is None:  # of a group of messages
            begun = None if known.host is None else known.host.messages
        if begun is None and waiting is not None and (known.collective or self._number is None):
            begun = waiting.sequence
        where = Where.ELSEWHERE if waiting is None else Where.WAITS
        if self._number is not None and begun is not None and begun < self._number:
            where = Where.MISSING
        operation = "" if waiting is None else waiting.operation
        return Place(where, begun, operation="" if operation == self._operation else operation)


def _known_by_group(status: RoleStatus) -> Iterable[tuple[str, _Known]]:
    hosts = {one.group: one for one in status.host}
    devices = {one.group: one for one in status.device or ()}
    waiting = status.waiting
    entered = {} if waiting is None else {waiting.group: waiting}
    for group in hosts.keys() | devices.keys() | entered.keys():
        yield group, _Known(entered.get(group), hosts.get(group), devices.get(group))


def _furthest(known: Iterable[_Known]) -> tuple[str, int | None]:
    """The collective that those wait in who have come furthest, by name, where the name is known,
    and number; of messages, which each role numbers for itself, only the name."""
    one_by_one = list(known)
    devices = [one.device for one in one_by_one if one.device is not None]
    hosts = [one.collective for one in one_by_one if one.collective is not None]
    numbers = [entered.sequence for entered in hosts]
    if devices:
        comparable = all(device.collective for device in devices)
        pending = [device.completed + 1 for device in devices if device.is_pending]
        hosts, numbers = [], pending if comparable else []
    number = max(numbers, default=None)
    if number is None:
        entered = [one.waiting for one in one_by_one if one.waiting is not None]
    else:
        entered = [one for one in hosts if one.sequence == number]
    names = Counter(one.operation for one in entered).most_common(1)
    return (names[0][0] if names else ""), number


def _is_message(waiting: Waiting) -> bool:
    return waiting.operation in MESSAGES
