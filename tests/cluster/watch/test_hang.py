"""Who hangs, from beats alone."""

from __future__ import annotations

from typing import Any

from deadpool_megatron.cluster.watch.hang import ProgressClock, RoleStatus, Waiting, find_hang
from deadpool_megatron.settings import Settings

SETTINGS = Settings(hang_seconds=10, first_step_seconds=100)


def status(
    waiting: tuple[str, str, int] | None,
    *,
    section: str = "train",
    iteration: int = 7,
    progress: int = 50,
    still: float = 11.0,
) -> RoleStatus:
    entered = None if waiting is None else Waiting(*waiting)
    return RoleStatus(section, iteration, entered, progress, still)


def test_no_hang_while_anybody_moves() -> None:
    waits = ("dp", "all_reduce", 4)
    assert find_hang({0: status(waits), 1: status(waits, still=0.5)}, SETTINGS) is None
    assert find_hang({}, SETTINGS) is None


def test_culprit_is_who_does_not_wait() -> None:
    hang = find_hang({0: status(("dp", "all_reduce", 4)), 1: status(None)}, SETTINGS)
    assert hang is not None
    assert hang.culprits == (1,)
    assert "role 1 in section train of iteration 7" in hang.cause


def test_of_several_outside_the_earliest_iteration_counts() -> None:
    found = {0: status(None, iteration=8), 1: status(None, iteration=7), 2: status(None)}
    hang = find_hang(found, SETTINGS)
    assert hang is not None
    assert hang.culprits == (1, 2)


def test_culprit_is_who_is_behind_in_its_group() -> None:
    found = {
        0: status(("tp", "all_reduce", 9)),
        1: status(("tp", "all_gather", 8)),
        2: status(("pp", "recv", 3)),
    }
    hang = find_hang(found, SETTINGS)
    assert hang is not None
    assert hang.culprits == (1,)
    assert "did not enter operation 9 of group tp" in hang.cause
    assert "waits in operation 8 (all_gather)" in hang.cause


def test_different_groups_fall_back_to_the_count_of_operations() -> None:
    found = {
        0: status(("tp", "all_reduce", 9), progress=60),
        1: status(("pp", "recv", 3), progress=58),
    }
    hang = find_hang(found, SETTINGS)
    assert hang is not None
    assert hang.culprits == (1,)


def test_hang_without_a_visible_culprit_is_still_a_hang() -> None:
    hang = find_hang({r: status(("dp", "barrier", 4)) for r in range(3)}, SETTINGS)
    assert hang is not None
    assert hang.culprits == ()


def test_one_role_in_a_long_section_gives_all_its_limit() -> None:
    waits = status(("world", "barrier", 2))
    for section in ("first-step", "evaluation", "save", "load"):
        long = status(None, section=section)
        assert find_hang({0: waits, 1: long}, SETTINGS) is None, section
    late = {
        0: status(("world", "barrier", 2), still=101),
        1: status(None, section="save", still=101),
    }
    hang = find_hang(late, SETTINGS)
    assert hang is not None
    assert hang.culprits == (1,)


def test_idle_roles_are_no_culprits() -> None:
    idle = {0: status(None, section="paused"), 1: status(None, section="done")}
    assert find_hang(idle, SETTINGS) is None
    hang = find_hang({**idle, 2: status(None)}, SETTINGS)
    assert hang is not None
    assert hang.culprits == (2,)


def test_clock_counts_since_the_last_change() -> None:
    def beat(progress: int) -> dict[str, Any]:
        return {"section": "train", "iteration": 1, "progress": progress, "waiting": None}

    clock = ProgressClock()
    assert clock.update({0: beat(1)}, 10.0)[0].still_seconds == 0.0
    assert clock.update({0: beat(1)}, 14.0)[0].still_seconds == 4.0
    assert clock.update({0: beat(2)}, 15.0)[0].still_seconds == 0.0
    assert clock.update({}, 16.0) == {}
    assert clock.update({0: beat(2)}, 20.0)[0].still_seconds == 0.0
