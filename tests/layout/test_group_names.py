"""The name of a group tells its roles, in few characters, and is read back without trust."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.layout.group_names import group_name, roles_in


@pytest.mark.parametrize(
    ("roles", "name"),
    [
        (range(512), "WORLD(0-511)"),
        (range(1, 512, 8), "WORLD(1-505:8)"),
        ((0, 1), "WORLD(0,1)"),
        ((0, 1, 2, 3, 8, 9, 10, 11), "WORLD(0-3,8-11)"),
        ((5, 2, 1), "WORLD(5,2,1)"),
    ],
)
def test_a_large_group_has_a_short_name(roles: tuple[int, ...], name: str) -> None:
    assert group_name("WORLD", roles) == name


@given(st.lists(st.integers(0, 40), unique=True, min_size=1))
def test_a_name_tells_the_roles(roles: list[int]) -> None:
    assert roles_in(group_name("TP (of experts)", roles), range(41)) == tuple(roles)


@pytest.mark.parametrize(
    "name",
    [
        *("world", "world()", "world(a)", "world(0-999999999999)", "world(0-8:0)", "(", "w(1-)"),
        f"world(0-{10**30})",
    ],
)
def test_a_name_that_tells_no_roles_costs_nothing(name: str) -> None:
    assert roles_in(name, range(8)) == ()
