"""What a node is told of a record is all that it needs of it, whatever it knew before."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.cluster.link.record_delta import (
    NotTheBase,
    RecordKeeper,
    RecordTeller,
    apply,
    change,
    pack,
)
from deadpool_megatron.layout.records import (
    Decoding,
    EpochRecord,
    Generation,
    NodeAddress,
    Recipe,
    Replay,
    Restore,
    Seat,
    Source,
)
from deadpool_megatron.layout.schemes import Kind, ProtectionPlan, SchemeNumbers
from deadpool_megatron.wire.framing import WireError

nodes = st.integers(0, 6)
addresses = st.builds(
    NodeAddress,
    st.sampled_from(["a", "b"]),
    st.integers(1, 3),
    st.sampled_from("xy"),
    st.booleans(),
)
seats = st.builds(Seat, nodes, st.integers(0, 3), st.integers(0, 2))
places = st.lists(st.builds(Source, nodes, st.integers(0, 12)), max_size=2).map(tuple)
generations = st.builds(Generation, st.integers(0, 3), st.integers(0, 9))
decodings = st.builds(
    Decoding,
    st.just((0, 3)),
    st.integers(1, 2),
    st.dictionaries(st.integers(0, 3), places, max_size=2),
)
replays = st.builds(
    Replay,
    generations,
    st.lists(generations, max_size=2).map(tuple),
    st.dictionaries(generations, st.dictionaries(st.just("main"), places), max_size=2),
)
recipes = st.builds(Recipe, st.dictionaries(st.just("main"), decodings), st.none() | replays)
plans = st.builds(
    ProtectionPlan,
    st.builds(SchemeNumbers, st.sampled_from(Kind), st.integers(0, 4), st.integers(1, 8)),
    st.integers(1, 9),
)


def for_node(record: EpochRecord, node: int) -> EpochRecord:
    """The record as this node needs it: with the sources of the roles it plays only."""
    mine = {role for role, seat in record.seats.items() if seat.node == node}
    restore = replace(
        record.restore,
        sources={r: found for r, found in record.restore.sources.items() if r in mine},
        recipes={r: recipe for r, recipe in record.restore.recipes.items() if r in mine},
    )
    return replace(record, restore=restore)


def with_recipes(restore: Restore, chosen: dict[int, Recipe]) -> Restore:
    """Only roles that have an entry among the sources have recipes."""
    return replace(restore, recipes={r: one for r, one in chosen.items() if r in restore.sources})


restores = st.builds(
    Restore,
    st.sampled_from(["initial", "memory", "durable"]),
    generations,
    st.sampled_from(["step", "save"]),
    st.sampled_from(["", "/checkpoint"]),
    st.dictionaries(
        st.integers(0, 12),
        st.dictionaries(
            st.sampled_from(["main", "extras@step"]),
            places,
        ),
        max_size=4,
    ),
)
records = st.builds(
    EpochRecord,
    epoch=st.just(1),
    seats=st.dictionaries(st.integers(0, 12), seats, max_size=5),
    nodes=st.dictionaries(nodes, addresses, max_size=4),
    restore=st.builds(
        with_recipes, restores, st.dictionaries(st.integers(0, 12), recipes, max_size=3)
    ),
    replicas=st.integers(1, 3),
    emitted_up_to=st.integers(0, 9),
    fewer_copies=st.frozensets(st.integers(0, 12), max_size=4),
    cause=st.text(max_size=5),
    protection=plans,
)


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 4)
@given(found=st.lists(records, min_size=1, max_size=4), node=nodes, data=st.data())
def test_a_node_has_its_part_of_the_newest_record(
    found: list[EpochRecord], node: int, data: st.DataObject
) -> None:
    keeper, before = RecordKeeper(), None
    for epoch, some in enumerate(found, start=1):
        record = replace(some, epoch=epoch)
        teller = RecordTeller(record, before)
        before = record
        if data.draw(st.booleans(), label="missed"):
            continue
        parts = teller.parts(node, keeper.epoch)
        assert parts is not None
        assert keeper.take(json.loads(json.dumps(parts))) == for_node(record, node)
        assert teller.parts(node, keeper.epoch) is None


@settings(max_examples=settings().max_examples // 4)
@given(record=records)
def test_the_journal_gives_a_record_back(record: EpochRecord) -> None:
    assert EpochRecord.from_dict(json.loads(json.dumps(record.to_dict()))) == record


def cluster(nodes_count: int, epoch: int = 1) -> EpochRecord:
    roles = range(nodes_count * 8)
    return EpochRecord(
        epoch=epoch,
        seats={role: Seat(role // 8, role % 8, 0) for role in roles},
        nodes={n: NodeAddress(f"10.0.0.{n}", 40000, f"n{n}") for n in range(nodes_count + 1)},
        restore=Restore(
            "memory",
            Generation(1, 7),
            sources={role: {"main": (Source(role // 8, role),)} for role in roles},
        ),
    )


def test_the_loss_of_a_node_is_as_short_a_message_in_a_large_cluster_as_in_a_small_one() -> None:
    sizes = []
    for count in (16, 1024):
        before = cluster(count)
        seats = {**before.seats, **{role: Seat(count, role, 0) for role in range(8)}}
        left = {node: address for node, address in before.nodes.items() if node != 0}
        after = replace(before, epoch=2, seats=seats, nodes=left)
        told = RecordTeller(after, before).parts(5, 1)
        sizes.append(len(json.dumps(told)))
    assert sizes[1] < sizes[0] + 50
    assert sizes[1] < 1500


def test_a_change_of_another_record_is_refused() -> None:
    first, second = cluster(2), cluster(2, epoch=2)
    with pytest.raises(NotTheBase, match="epoch 2 came, known is that of epoch 1"):
        apply(first, change(second, replace(second, epoch=3)), {})


def test_a_record_that_has_come_on_the_connection_before_is_no_news() -> None:
    keeper, first, second = RecordKeeper(), cluster(2), cluster(2, epoch=2)
    for base, record in ((None, first), (first, second), (first, second), (None, first)):
        keeper.take({"change": pack(change(base, record)), "sources": {}})
    assert keeper.epoch == 2


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"change": "{}", "sources": {}},
        {"change": "no base64", "sources": {}},
        {"change": "[]", "sources": {}},
        {"change": "eJw=", "sources": {}},
    ],
)
def test_garbage_is_refused_and_everything_is_asked_for_again(parts: dict[str, object]) -> None:
    keeper = RecordKeeper()
    told = RecordTeller(cluster(2), None).parts(0, 0)
    assert told is not None
    keeper.take(told)
    with pytest.raises(WireError, match="a record that cannot be used"):
        keeper.take(parts)
    assert keeper.epoch == 0
