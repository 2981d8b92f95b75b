"""Who plays which role after a loss: survivors stay, blocks move, spares are used sparingly."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.layout.planner import assign_seats
from deadpool_megatron.layout.records import Seat


def seats_of(*nodes: int, per_node: int = 2) -> dict[int, Seat]:
    return {
        i * per_node + slot: Seat(node, slot, 0)
        for i, node in enumerate(nodes)
        for slot in range(per_node)
    }


def members_of(*nodes: int, per_node: int = 2) -> dict[tuple[int, int], int]:
    return {(node, slot): 0 for node in nodes for slot in range(per_node)}


def test_dead_member_is_replaced_on_its_slot() -> None:
    members = {**members_of(0, 1, 2), (1, 0): 3}
    answer = assign_seats(seats_of(0, 1), members)
    assert answer.seats == {**seats_of(0, 1), 2: Seat(1, 0, 3)}


def test_dead_node_moves_as_a_block_to_one_spare() -> None:
    answer = assign_seats(seats_of(0, 1), members_of(0, 2, 3))
    assert answer.seats == {**seats_of(0, 2)}
    assert answer.unseated == ()


def test_warm_spares_first_then_lowest_id_and_avoided_ones_last() -> None:
    seats, members = seats_of(0, 1), members_of(0, 2, 3)
    warm = frozenset({(3, 0), (3, 1)})
    assert assign_seats(seats, members, warm=warm).seats[2].node == 3
    answer = assign_seats(seats, members, warm=frozenset({(2, 0)}), avoid=frozenset({2}))
    assert answer.seats[2].node == 3


def test_too_few_spares_leave_whole_blocks_without_seat() -> None:
    answer = assign_seats(seats_of(0, 1, 2), members_of(2, 3))
    assert answer.unseated == (2, 3)
    assert answer.seats == {0: Seat(3, 0, 0), 1: Seat(3, 1, 0), 4: Seat(2, 0, 0), 5: Seat(2, 1, 0)}


def test_spare_that_lacks_a_slot_does_not_fit() -> None:
    members = {**members_of(0), (2, 0): 0, **members_of(3)}
    assert assign_seats(seats_of(0, 1), members).seats[2].node == 3


def test_leaving_node_gives_its_roles_away_and_gets_none() -> None:
    seats, leaving = seats_of(0, 1), frozenset({1})
    assert assign_seats(seats, members_of(0, 1, 2), leaving=leaving).seats == seats_of(0, 2)
    assert assign_seats(seats, members_of(0, 1), leaving=leaving).unseated == (2, 3)


@given(
    training=st.integers(1, 5),
    spares=st.integers(0, 3),
    per_node=st.integers(1, 3),
    dead=st.sets(st.integers(0, 7)),
    leaving=st.frozensets(st.integers(0, 7)),
)
def test_survivors_stay_and_no_member_has_two_roles(
    training: int, spares: int, per_node: int, dead: set[int], leaving: frozenset[int]
) -> None:
    old = seats_of(*range(training), per_node=per_node)
    live = [node for node in range(training + spares) if node not in dead]
    answer = assign_seats(old, members_of(*live, per_node=per_node), leaving=leaving)
    assert set(answer.seats) | set(answer.unseated) == set(old)
    assert not set(answer.seats) & set(answer.unseated)
    assert len(set(answer.seats.values())) == len(answer.seats)
    for role, seat in answer.seats.items():
        assert seat.node in live
        assert seat.node not in leaving
        if old[role].node in live and old[role].node not in leaving:
            assert seat == old[role]
    idle = [n for n in live if n not in {s.node for s in answer.seats.values()} | leaving]
    idle = [n for n in idle if n >= training]
    assert not (answer.unseated and idle)
