"""Inventories come out of their short form as they went in."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.layout.inventories import pack_inventory, unpack_inventory
from deadpool_megatron.layout.records import Generation, Holding, Inventory, PartInfo, RoleLayout

roles = st.integers(0, 40)
names = st.sampled_from(["main", "expert", "extras@step"])
groups = st.one_of(
    st.lists(roles).map(tuple),
    st.builds(
        lambda first, count, step: tuple(range(first, first + count * step, step)),
        roles,
        st.integers(1, 8),
        st.integers(1, 5),
    ),
)
layouts = st.builds(
    RoleLayout,
    role=roles,
    parts=st.lists(st.builds(PartInfo, names, st.integers(0, 9), groups), max_size=3).map(tuple),
    peers=groups,
    slots=st.integers(2, 4),
    layout_hash=st.sampled_from("ab"),
    meaning=st.sampled_from(["", "last"]),
)
holdings = st.builds(
    Holding,
    roles,
    st.builds(Generation, st.integers(0, 3), st.integers(0, 9)),
    st.frozensets(names),
)
inventories = st.builds(
    Inventory,
    st.integers(0, 9),
    st.integers(0, 9),
    st.lists(holdings, max_size=5).map(tuple),
    st.lists(layouts, max_size=3).map(tuple),
)


@settings(max_examples=50)
@given(inventory=inventories)
def test_round_trip(inventory: Inventory) -> None:
    assert unpack_inventory(json.loads(json.dumps(pack_inventory(inventory)))) == inventory


def test_a_known_layout_of_the_same_hash_is_not_made_again() -> None:
    layout = RoleLayout(3, (PartInfo("main", 8, (3,)),), (1, 3, 5, 7), 2, "hash")
    other = RoleLayout(4, (PartInfo("main", 8, (4,)),), (0, 2, 4, 6), 2, "hash")
    packed = pack_inventory(Inventory(0, 1, (), (layout, other)))
    same = RoleLayout(4, other.parts, other.peers, 2, "another hash")
    found = unpack_inventory(packed, {3: layout, 4: same}).layouts
    assert found[0] is layout
    assert found[1] == other


def test_another_version_is_refused() -> None:
    packed = {**pack_inventory(Inventory(0, 1)), "version": 4}
    with pytest.raises(ValueError, match="inventory of version 4, known is 3"):
        unpack_inventory(packed)
