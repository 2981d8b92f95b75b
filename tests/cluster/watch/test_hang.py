"""Who hangs, from beats alone, and how soon: after what the steps of the run have taken."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.cluster.watch.hang import (
    MOST_GROUPS,
    MOST_ROLES,
    STEP,
    Entered,
    HangLimit,
    OnDevice,
    OnHost,
    ProgressClock,
    RoleStatus,
    find_hang,
    table_of,
)
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.words import group_name
from deadpool_megatron.settings import Settings
from tests.common.event_schema import check_event

LIMIT = 10.0
SETTINGS = Settings(hang_seconds=LIMIT, first_step_seconds=100)
NUMBERS = st.lists(st.integers(0, 3), min_size=3, max_size=3).map(lambda n: sorted(n, reverse=True))
LIMITED = Settings()
LOOK_SECONDS = 2.0


def status(
    waiting: tuple[str, str, int] | None,
    *,
    section: str = "train",
    iteration: int = 7,
    progress: int = 50,
    still: float = 11.0,
) -> RoleStatus:
    entered = None if waiting is None else Entered(*waiting)
    return RoleStatus(section, iteration, entered, progress, still)


def test_no_hang_while_anybody_moves() -> None:
    waits = ("dp", "all_reduce", 4)
    assert find_hang({0: status(waits), 1: status(waits, still=0.5)}, SETTINGS, LIMIT) is None
    idle = status(None, section="parked", still=0.5)
    assert find_hang({0: status(waits), 1: idle}, SETTINGS, LIMIT) is None
    assert find_hang({0: status(None, section="paused")}, SETTINGS, LIMIT) is None
    assert find_hang({}, SETTINGS, LIMIT) is None


_TP9, _DP4 = ("tp", "all_reduce", 9), ("dp", "barrier", 4)


@pytest.mark.parametrize(
    ("roles", "culprits", "words"),
    [
        pytest.param([status(_DP4), status(None)], (1,), "role 1 in section train", id="outside"),
        pytest.param(
            [status(None, iteration=8), status(None), status(None)],
            *((1, 2), "in section train of iteration 7"),
            id="the earliest iteration counts",
        ),
        pytest.param(
            [status(_TP9), status(("tp", "all_gather", 8)), status(("pp", "recv", 3))],
            *((1,), "did not enter operation 9 of group tp, but waits in operation 8 (all_gather)"),
            id="behind in its group",
        ),
        pytest.param(
            [status(_TP9, progress=60), status(("pp", "recv", 3), progress=58)],
            *((1,), "did not enter what the others have entered"),
            id="in different groups the count of operations",
        ),
        pytest.param([status(_DP4)] * 3, (), "none has begun fewer operations", id="no evidence"),
        pytest.param(
            [status(None, section="paused"), status(None, section="done"), status(None)],
            *((2,), "role 2 in section train"),
            id="idle ones are none",
        ),
    ],
)
def test_culprit_is_who_does_not_wait_or_is_behind(
    roles: list[RoleStatus], culprits: tuple[int, ...], words: str
) -> None:
    hang = find_hang(dict(enumerate(roles)), SETTINGS, LIMIT)
    assert hang is not None
    assert hang.culprits == culprits
    assert words in hang.cause


def test_one_role_in_a_long_section_gives_all_its_limit() -> None:
    waits = status(("world", "barrier", 2))
    for section in ("first-step", "evaluation", "save", "load"):
        long = status(None, section=section)
        assert find_hang({0: waits, 1: long}, SETTINGS, LIMIT) is None, section
    late = {
        0: status(("world", "barrier", 2), still=101),
        1: status(None, section="save", still=101),
    }
    hang = find_hang(late, SETTINGS, LIMIT)
    assert hang is not None
    assert hang.culprits == (1,)


def test_clock_counts_since_the_last_change() -> None:
    def beat(progress: int) -> dict[str, Any]:
        return {"section": "train", "iteration": 1, "progress": progress, "waiting": None}

    clock = ProgressClock()
    assert clock.update({0: beat(1)}, 10.0)[0].still_seconds == 0.0
    assert clock.update({0: beat(1)}, 14.0)[0].still_seconds == 4.0
    assert clock.update({0: beat(2)}, 15.0)[0].still_seconds == 0.0
    assert clock.update({}, 16.0) == {}
    assert clock.update({0: beat(2)}, 20.0)[0].still_seconds == 0.0


def on_device(
    *groups: tuple[str, int, int | None, int], iteration: int = 7, messages: tuple[str, ...] = ()
) -> RoleStatus:
    """Group, enqueued, started, completed; what is in ``messages`` has numbers of its own."""
    device = tuple(OnDevice(*group, collective=group[0] not in messages) for group in groups)
    return RoleStatus("step", iteration, None, 50, 11.0, device)


@pytest.mark.parametrize(
    ("roles", "culprits", "words"),
    [
        # Role 1 sleeps before it enqueues: its device has done all it was given.
        ([(("dp", 5, 5, 4),), (("dp", 4, 4, 4),)], (1,), "role 1 has nothing to do"),
        # It sleeps in the pipeline, whose numbers say nothing across roles.
        ([(("pp", 9, 9, 8),), (("pp", 3, 3, 3),)], (1,), "role 1 has nothing to do"),
        # Role 2 is busy with others in a group of its own, for which role 1 waits.
        (
            [
                (("dp", 5, 5, 4), ("tp", 7, 7, 7)),
                (("dp", 4, 4, 4), ("tp", 8, 8, 7)),
                (("dp", 4, 4, 4), ("tp", 7, 7, 7), ("pp", 2, 2, 1)),
            ],
            (2,),
            "did not enqueue operation",
        ),
        # The device of role 1 hangs in a kernel of the model: what was enqueued after it waits.
        ([(("dp", 5, 5, 4),), (("dp", 5, 4, 4),)], (1,), "does not start what others are in"),
        # A collective after nine messages, in a group of both: its number is the lower one.
        ([(("pp", 1, 1, 9),), (("pp", 9, 9, 9),)], (1,), "role 1 has nothing to do"),
        # As torch tells by default, nothing is known of what was started: no evidence.
        ([(("dp", 5, None, 4),), (("dp", 5, None, 4),)], (), "none has begun fewer"),
        ([(("dp", 5, 5, 4),), (("dp", 5, None, 4),)], (), "none has begun fewer"),
        ([(("dp", 5, None, 4),), (("dp", 5, 4, 4),)], (), "none has begun fewer"),
        ([(("dp", 5, None, 4),), (("dp", 4, None, 4),)], (1,), "role 1 has nothing to do"),
        # All are in it: no evidence.
        ([(("dp", 5, 5, 4),), (("dp", 6, 5, 4),)], (), "none has begun fewer"),
        ([(("dp", 5, 5, 5),), (("dp", 5, 5, 5),)], (), "no device has anything to do"),
    ],
)
def test_on_devices_only_evidence_names_a_culprit(
    roles: list[tuple[tuple[str, int, int | None, int], ...]], culprits: tuple[int, ...], words: str
) -> None:
    found = {role: on_device(*groups, messages=("pp",)) for role, groups in enumerate(roles)}
    hang = find_hang(found, SETTINGS, LIMIT)
    assert hang is not None
    assert hang.culprits == culprits
    assert words in hang.cause


@pytest.mark.parametrize("enqueued", [4, 5])
def test_a_host_that_stands_in_what_it_enqueues_waits(enqueued: int) -> None:
    """Role 1 connects to role 2, which hangs; it has or has not enqueued what role 0 is in."""
    connects = on_device(("dp", enqueued, None, enqueued), ("pp", 0, None, 0))
    found = {
        0: on_device(("dp", 6, None, 5)),
        1: replace(connects, waiting=Entered("pp", "coalesced", 1)),
        2: on_device(("pp", 0, None, 0)),
    }
    hang = find_hang(found, SETTINGS, LIMIT)
    assert hang is not None
    assert hang.culprits == (2,)
    hang = find_hang({role: found[role] for role in (0, 1)}, SETTINGS, LIMIT)
    assert hang is not None
    assert hang.culprits == ()


def test_what_a_beat_says_of_a_device() -> None:
    beat = {"section": "step", "iteration": 3, "waiting": None, "progress": 9}
    told = RoleStatus.from_beat({**beat, "device": [["dp(0,1)", 5, 5, 4, True]]}, 2.0)
    assert told.device == (OnDevice("dp(0,1)", 5, 5, 4, True),)
    assert RoleStatus.from_beat(beat, 2.0).device is None
    told = RoleStatus.from_beat({**beat, "device": [["dp(0,1)", 5, None, 4, True]]}, 2.0)
    assert told.device == (OnDevice("dp(0,1)", 5, None, 4, True),)


def test_where_nobody_waits_there_is_no_evidence() -> None:
    """All read from one storage that does not answer, or all compute."""
    found = {role: status(None) for role in range(3)}
    hang = find_hang(found, SETTINGS, LIMIT)
    assert hang is not None
    assert hang.culprits == ()
    assert "no role waits in a communication, all are in iteration 7" in hang.cause
    # Others that have nothing to do are no evidence either.
    idle = find_hang({**found, 3: status(None, section="paused")}, SETTINGS, LIMIT)
    assert idle is not None
    assert idle.culprits == ()


@pytest.mark.parametrize(
    "others",
    [
        {},
        {1: status(("dp", "all_reduce", 4))},
        {1: status(None, iteration=8), 2: status(None, iteration=8)},
        {1: status(None, section="paused")},
    ],
)
def test_one_that_hangs_alone_is_named(others: dict[int, RoleStatus]) -> None:
    hang = find_hang({0: status(None), **others}, SETTINGS, LIMIT)
    assert hang is not None
    assert hang.culprits == (0,)


ON_HOST = st.builds(
    status,
    st.none() | st.tuples(st.sampled_from("ab"), st.just("all_reduce"), st.integers(1, 3)),
    iteration=st.integers(7, 8),
    progress=st.integers(50, 52),
)
ON_DEVICE = st.lists(NUMBERS, min_size=2, max_size=2).map(
    lambda groups: on_device(*((name, *n) for name, n in zip("ab", groups, strict=True)))
)


@given(st.lists(ON_HOST, min_size=2, max_size=5) | st.lists(ON_DEVICE, min_size=1, max_size=5))
def test_never_is_every_role_named(roles: list[RoleStatus]) -> None:
    """To kill all processes of a job for a hang would cost all that it has in its processes."""
    hang = find_hang(dict(enumerate(roles)), SETTINGS, LIMIT)
    assert hang is not None
    assert len(hang.culprits) < len(roles)


def at(iteration: int, *sections: str) -> dict[int, RoleStatus]:
    names = sections or ("step", "step")
    return {
        role: RoleStatus(name, iteration, None, iteration, 0.0) for role, name in enumerate(names)
    }


def after_steps(limit: HangLimit, seconds: float, steps: int, now: float = 0.0) -> float:
    for iteration in range(1, steps + 2):
        limit.look(at(iteration), now)
        now += seconds
    return now


def beats(
    step_seconds: float, stuck_from: int
) -> Iterator[tuple[float, dict[int, dict[str, object]]]]:
    """What two roles say at each look; from an iteration on they say the same."""
    now = 0.0
    while True:
        iteration = min(int(now / step_seconds), stuck_from)
        beat = {"section": "step", "iteration": iteration, "progress": 9 * iteration}
        yield (
            now,
            {0: {**beat, "waiting": ["dp", "all_reduce", iteration]}, 1: {**beat, "waiting": None}},
        )
        now += LOOK_SECONDS


def test_a_hang_is_found_within_three_of_the_longest_steps() -> None:
    clock, limit = ProgressClock(), HangLimit(LIMITED)
    for now, said in beats(8.0, stuck_from=10):
        statuses = clock.update(said, now)
        limit.look(statuses, now)
        hang = find_hang(statuses, LIMITED, limit.seconds)
        if hang is not None:
            break
    assert hang.culprits == (1,)
    assert now <= 80.0 + 3 * 8.0


@pytest.mark.parametrize(
    ("step_seconds", "steps", "seconds"),
    [
        pytest.param(8.0, 4, LIMITED.hang_seconds, id="too few steps were seen"),
        pytest.param(8.0, 6, 20.0, id="known"),
        pytest.param(0.3, 100, 20.0, id="fast steps, and storage that is busy for a moment"),
        pytest.param(200.0, 9, LIMITED.hang_seconds, id="never more than the user's"),
    ],
)
def test_the_limit_in_force(step_seconds: float, steps: int, seconds: float) -> None:
    limit = HangLimit(LIMITED)
    after_steps(limit, step_seconds, steps)
    assert limit.seconds == seconds


def test_the_longest_step_counts() -> None:
    limit = HangLimit(LIMITED)
    now = after_steps(limit, 8.0, 9)
    limit.look(at(11), now + 30.0)
    assert limit.seconds == 2.5 * 38.0


@pytest.mark.parametrize("section", ["evaluation", "save", "paused", "gate"])
def test_what_may_take_long_is_no_step(section: str) -> None:
    limit = HangLimit(LIMITED)
    now = after_steps(limit, 8.0, 9)
    limit.look(at(10, "step", section), now)
    limit.look(at(10, "step", "step"), now + 200.0)
    limit.look(at(11), now + 205.0)
    limit.look(at(12), now + 213.0)
    assert limit.seconds == 20.0


def test_who_waits_for_protection_has_the_users_limit() -> None:
    """The gate waits for another node, or a network that is slow: nobody would be any better."""
    waits = {0: RoleStatus("gate", 7, None, 50, 60.0), 1: RoleStatus(STEP, 7, None, 50, 60.0)}
    assert find_hang(waits, LIMITED, 20.0) is None
    assert find_hang({role: replace(s, section=STEP) for role, s in waits.items()}, LIMITED, 20.0)


def test_another_epoch_begins_no_step() -> None:
    limit = HangLimit(LIMITED)
    now = after_steps(limit, 8.0, 9)
    limit.forget_step()
    limit.look(at(9), now + 60.0)  # it goes back
    limit.look(at(10), now + 100.0)
    assert limit.seconds == 20.0


def on_host(waiting: tuple[str, str, int] | None, *begun: tuple[str, int, int]) -> RoleStatus:
    """The operation that it waits in; group, collectives, messages."""
    entered = None if waiting is None else Entered(*waiting)
    return RoleStatus("step", 7, entered, 50, 11.0, host=tuple(OnHost(*one) for one in begun))


def table(statuses: Mapping[int, RoleStatus]) -> list[dict[str, Any]]:
    """Its groups, held against the schema."""
    found = table_of(statuses)
    check_event(Event(Kind.HANG, 1, data={"roles": [], **found}).to_dict())
    groups: list[dict[str, Any]] = found["groups"]
    return groups


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
    everybody = groups[0]
    assert everybody["group"] == "world(0-511)", "first where somebody is missing"
    assert everybody["rows"][0] == {"roles": [300], "where": "missing", "begun": 5}
    assert sum(len(row["roles"]) for row in everybody["rows"]) == MOST_ROLES
    assert everybody["left_out"] == 512 - MOST_ROLES
    assert {row["where"] for row in everybody["rows"]} == {"missing", "waits", "elsewhere"}
    assert len(json.dumps(found)) < 1 << 16
