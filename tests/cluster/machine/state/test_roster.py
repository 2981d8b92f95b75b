"""Immutable collections of the state machine: the same answers as plain sets and dictionaries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.cluster.machine.state.fleet import MemberState, MemberStatus, MemberTable
from deadpool_megatron.cluster.machine.state.persistent import PersistentSet

items = st.integers(0, 20)
places = st.tuples(st.integers(0, 3), st.integers(0, 2))


@given(start=st.sets(items), changes=st.lists(st.tuples(items, st.booleans())))
def test_a_changed_set_is_a_new_one(start: set[int], changes: list[tuple[int, bool]]) -> None:
    plain, kept = set(start), PersistentSet(start)
    for item, there in changes:
        before = set(kept)
        changed = kept.with_item(item) if there else kept.without(item)
        assert kept == before
        plain = plain | {item} if there else plain - {item}
        kept = changed
    assert kept == plain == frozenset(kept)
    assert len(kept) == len(plain)
    assert kept | {7} == plain | {7}
    assert {7, 8} - kept == {7, 8} - plain
    assert hash(kept) == hash(PersistentSet(sorted(plain)))


@given(
    changes=st.lists(
        st.one_of(
            st.tuples(places, st.sampled_from(MemberStatus)),
            st.integers(0, 3),
            st.sets(places, max_size=4),
        )
    )
)
def test_what_a_roster_counts_is_what_a_scan_finds(
    changes: list[tuple[tuple[int, int], MemberStatus] | int | set[tuple[int, int]]],
) -> None:
    roster, plain = MemberTable(), dict[tuple[int, int], MemberState]()
    for number, change in enumerate(changes):
        if isinstance(change, int):
            roster = roster.without_node(change)
            plain = {place: member for place, member in plain.items() if place[0] != change}
        elif isinstance(change, set):
            warm = change & set(plain)
            roster = roster.with_warm(warm, number)
            for place in warm:
                plain[place] = MemberState(plain[place].incarnation, MemberStatus.WARM, number)
        else:
            place, status = change
            plain[place] = MemberState(number, status, float(number))
            roster = roster.with_member(place, plain[place])
    assert dict(roster) == plain
    assert len(roster) == len(plain)

    def having(*wanted: MemberStatus) -> set[tuple[int, int]]:
        return {place for place, member in plain.items() if member.status in wanted}

    assert roster.killed == having(MemberStatus.KILLED)
    assert roster.starting == having(MemberStatus.STARTING)
    assert roster.building == having(MemberStatus.STARTING, MemberStatus.RUNNING)
