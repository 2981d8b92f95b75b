"""The table of a hang: who is where in each group that somebody waits in, and no more of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cluster.watch.hang import OnDevice, OnHost, RoleStatus, Waiting
from deadpool_megatron.cluster.watch.hang_table import (
    MOST_GROUPS,
    MOST_ROLES,
    table_of,
)
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.words import group_name
from tests.common.event_schema import check_event


def on_host(waiting: tuple[str, str, int] | None, *begun: tuple[str, int, int]) -> RoleStatus:
    """What it waits in; group, collectives, messages."""
    entered = None if waiting is None else Waiting(*waiting)
    return RoleStatus("step", 7, entered, 50, 11.0, host=tuple(OnHost(*one) for one in begun))


def on_device(*groups: tuple[str, int, int | None, int], collective: bool = True) -> RoleStatus:
    """Group, enqueued, started, completed."""
    device = tuple(OnDevice(*group, collective) for group in groups)
    return RoleStatus("step", 7, None, 50, 11.0, device)


def table(statuses: Mapping[int, RoleStatus]) -> list[dict[str, Any]]:
    """Its groups, held against the schema."""
    found = table_of(statuses)
    check_event(Event(Kind.HANG, 1, data={"roles": [], **found}).to_dict())
    groups: list[dict[str, Any]] = found["groups"]
    return groups


def test_who_has_not_begun_what_the_others_wait_in_is_missing() -> None:
    waits = on_host(("dp(0-2)", "all_reduce", 9), ("dp(0-2)", 9, 0), ("tp(0,1)", 4, 0))
    (group,) = table({0: waits, 1: waits, 2: on_host(None, ("dp(0-2)", 8, 0))})
    assert group == {
        "group": "dp(0-2)",
        "operation": "all_reduce",
        "number": 9,
        "rows": [
            {"roles": [2], "where": "missing", "begun": 8},
            {"roles": [0, 1], "where": "waits", "begun": 9},
        ],
        "left_out": 0,
    }


def test_groups_of_one_description_are_told_apart() -> None:
    statuses = {
        role: on_host((place, "all_reduce", number), (place, number, 0))
        for role, place, number in ((0, "tp(0,1)", 4), (1, "tp(0,1)", 4), (2, "tp(2,3)", 5))
    }
    found = table({**statuses, 3: on_host(None, ("tp(2,3)", 4, 0))})
    wheres = [(group["group"], [row["where"] for row in group["rows"]]) for group in found]
    # First where somebody is missing.
    assert wheres == [("tp(2,3)", ["missing", "waits"]), ("tp(0,1)", ["waits"])]


def test_who_waits_in_another_operation_is_told_with_it() -> None:
    found = table(
        {
            0: on_host(("dp(0-2)", "all_reduce", 9), ("dp(0-2)", 9, 0)),
            1: on_host(("dp(0-2)", "all_gather", 8), ("dp(0-2)", 8, 0)),
            2: on_host(("dp(0-2)", "recv", 3), ("dp(0-2)", 9, 3)),
        }
    )
    rows = {row["roles"][0]: (row["where"], row.get("operation")) for row in found[0]["rows"]}
    assert rows == {0: ("waits", None), 1: ("missing", "all_gather"), 2: ("waits", "recv")}


def test_on_devices_the_numbers_are_those_of_the_recorder() -> None:
    (group,) = table(
        {
            0: on_device(("dp(0-2)", 5, 5, 4), ("tp(0)", 7, 7, 7)),
            1: on_device(("dp(0-2)", 4, 4, 4)),
            2: on_device(("dp(0-2)", 5, 4, 4)),
        }
    )
    assert (group["operation"], group["number"]) == ("", 5)
    assert group["rows"] == [
        {"roles": [1], "where": "missing", "begun": 4, "started": 4, "ended": 4},
        {"roles": [2], "where": "not-started", "begun": 5, "started": 4, "ended": 4},
        {"roles": [0], "where": "waits", "begun": 5, "started": 5, "ended": 4},
    ]


def test_the_table_of_a_large_run_is_small_and_shows_who_differs() -> None:
    """512 roles in pairs, each in a collective, and all of them but one in one over all."""
    world = group_name("world", range(512))
    statuses = {}
    for role in range(512):
        pair = group_name("pair", (role & ~1, role | 1))
        statuses[role] = on_host((pair, "all_gather", 3), (pair, 3, 0), (world, 6, 0))
    for role in range(100):
        statuses[role] = on_host((world, "all_reduce", 6), (world, 6, 0))
    statuses[300] = on_host(None, (world, 5, 0))
    found = table_of(statuses)
    groups = found["groups"]
    assert (len(groups), found["left_out"]) == (MOST_GROUPS, 207 - MOST_GROUPS)
    everybody = next(group for group in groups if group["group"] == "world(0-511)")
    assert everybody["rows"][0] == {"roles": [300], "where": "missing", "begun": 5}
    assert sum(len(row["roles"]) for row in everybody["rows"]) == MOST_ROLES
    assert everybody["left_out"] == 512 - MOST_ROLES
    assert {row["where"] for row in everybody["rows"]} == {"missing", "waits", "elsewhere"}
    assert len(json.dumps(found)) < 1 << 16
