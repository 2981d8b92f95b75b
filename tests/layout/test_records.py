"""A record, its seats, inventories and names of groups come back as they went in."""

import json
from dataclasses import fields, replace

from hypothesis import given, settings, strategies as st

from deadpool_megatron.layout import descriptions, records, records as rec, schemes
from deadpool_megatron.layout.history import History
from deadpool_megatron.layout.sizes import Sizes

G = rec.Generation(2, 7)
PLACES = {"shard": (rec.Source(1, 0),)}
RECIPE = rec.Recipe({"tail": rec.Decoding((0, 1), 1, {2: (rec.Source(1, 9),)})}, {4: "hash"})
RECORD = rec.EpochRecord(
    epoch=3,
    seats={0: rec.Seat(1, 0, 2)},
    nodes={1: rec.NodeAddress("host", 7, "rack1", True)},
    restore=rec.Restore("memory", G, "save", "/here", {0: PLACES}, {0: RECIPE}),
    replicas=2,
    emitted_up_to=6,
    fewer_copies=frozenset({0}),
    cause="a node is gone",
    protection=schemes.ProtectionPlan(schemes.SchemeNumbers(schemes.SchemeKind.PARITY, 4)),
    history=History(kept={2: 7}, recoveries=4, sizes=Sizes(2, (1, 2))),
)
LAYOUT = rec.RoleLayout(3, (rec.PartInfo("shard", 8, (3,)),), (3, 4), 3, "hash", meaning="first")
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
    records.RoleLayout,
    role=roles,
    parts=st.lists(st.builds(records.PartInfo, names, st.integers(0, 9), groups), max_size=3).map(
        tuple
    ),
    peers=groups,
    slots=st.integers(2, 4),
    layout_hash=st.sampled_from("ab"),
    meaning=st.sampled_from(["", "last"]),
)
holdings = st.builds(
    records.Holding,
    roles,
    st.builds(records.Generation, st.integers(0, 3), st.integers(0, 9)),
    st.frozensets(names),
)
inventories = st.builds(
    records.Inventory,
    st.integers(0, 9),
    st.integers(0, 9),
    st.lists(holdings, max_size=5).map(tuple),
    st.lists(layouts, max_size=3).map(tuple),
)


def test_nothing_of_a_record_is_lost_on_its_way():
    read = rec.EpochRecord.from_dict(json.loads(json.dumps(RECORD.to_dict())))
    for field in fields(rec.EpochRecord):
        assert getattr(read, field.name) == getattr(RECORD, field.name), field.name
    assert rec.RoleLayout.from_dict(json.loads(json.dumps(LAYOUT.to_dict()))) == LAYOUT


def test_slots_are_as_large_as_copies_and_replicas_make_them():
    shared = (replace(LAYOUT.parts[0], replicas=(3, 4)),)
    assert replace(LAYOUT, parts=shared).shape != LAYOUT.shape


def test_a_seat_is_found_by_its_very_process_only():
    table = records.SeatTable(
        {0: records.Seat(4, 0, 2), 1: records.Seat(4, 1, 0), 2: records.Seat(5, 0, 0)}
    )
    assert table.role_of(4, 0, 2) == 0
    assert table.role_of(4, 0, 1) is None
    assert table.role_of(6, 0, 0) is None
    assert table.role_by_place == {(4, 0): 0, (4, 1): 1, (5, 0): 2}
    assert table.nodes == {4, 5}
    assert table == {0: records.Seat(4, 0, 2), 1: records.Seat(4, 1, 0), 2: records.Seat(5, 0, 0)}


@settings(max_examples=50)
@given(inventory=inventories)
def test_round_trip(inventory):
    assert records.Inventory.from_dict(json.loads(json.dumps(inventory.to_dict()))) == inventory


@given(st.lists(st.integers(0, 40), unique=True, min_size=1))
def test_group_name_contains_the_roles(roles):
    name = descriptions.group_name("TP (of experts)", roles)
    assert descriptions.roles_in(name, range(41)) == tuple(roles)
