"""Seats of roles, looked up from either side. Pure."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from functools import cached_property

from deadpool_megatron.layout.records import Seat


class SeatTable(Mapping[int, Seat]):
    """Role -> seat, never changed, with the lookups that are made for every message.

    Each index is built when it is first asked for and then kept. Thread-safe: two threads may at
    worst build the same index twice.
    """

    def __init__(self, seats: Mapping[int, Seat]) -> None:
        self._seats = dict(seats)

    def __getitem__(self, role: int) -> Seat:
        return self._seats[role]

    def __iter__(self) -> Iterator[int]:
        return iter(self._seats)

    def __len__(self) -> int:
        return len(self._seats)

    def __repr__(self) -> str:
        return f"SeatTable({self._seats})"

    def keys(self) -> KeysView[int]:
        """As of a dictionary, and as fast."""
        return self._seats.keys()

    def values(self) -> ValuesView[Seat]:
        """As of a dictionary, and as fast."""
        return self._seats.values()

    def items(self) -> ItemsView[int, Seat]:
        """As of a dictionary, and as fast."""
        return self._seats.items()

    @cached_property
    def role_by_place(self) -> Mapping[tuple[int, int], int]:
        """(node, slot) -> role, whatever the incarnation."""
        return {(seat.node, seat.slot): role for role, seat in self._seats.items()}

    @cached_property
    def nodes(self) -> frozenset[int]:
        """Nodes that have a seat."""
        return frozenset(seat.node for seat in self._seats.values())

    def role_of(self, node: int, slot: int, incarnation: int) -> int | None:
        """The role this very process has a seat for."""
        role = self.role_by_place.get((node, slot))
        return role if role is not None and self[role].incarnation == incarnation else None
