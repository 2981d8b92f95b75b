"""Seats looked up from either side."""

from __future__ import annotations

from deadpool_megatron.layout.records import Seat
from deadpool_megatron.layout.seats import SeatTable


def test_a_seat_is_found_by_its_very_process_only() -> None:
    table = SeatTable({0: Seat(4, 0, 2), 1: Seat(4, 1, 0), 2: Seat(5, 0, 0)})
    assert table.role_of(4, 0, 2) == 0
    assert table.role_of(4, 0, 1) is None
    assert table.role_of(6, 0, 0) is None
    assert table.role_by_place == {(4, 0): 0, (4, 1): 1, (5, 0): 2}
    assert table.nodes == {4, 5}
    assert table == {0: Seat(4, 0, 2), 1: Seat(4, 1, 0), 2: Seat(5, 0, 0)}


def test_a_table_does_not_follow_what_it_was_made_of() -> None:
    seats = {0: Seat(4, 0, 2)}
    table = SeatTable(seats)
    seats[0] = Seat(5, 0, 0)
    assert table[0] == Seat(4, 0, 2)
