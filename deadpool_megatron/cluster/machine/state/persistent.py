"""Immutable collections whose changed copies share what did not change.

The state machine makes a new state of every input, in about 10 us. To copy a set of 4,096 roles
takes 23 us and a dictionary 41 us, of 32,768 roles some ms; a hash trie (Bagwell; here MagicStack's
``immutables``) takes 0.4 and 2 us.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any, Generic, TypeVar

from immutables import Map

T = TypeVar("T")


class PersistentSet(Set[T], Generic[T]):
    """A set that is never changed: :meth:`with_item` and :meth:`without` answer a new one in
    O(log n). Equal to any set with the same items; iterates in no particular order. Thread-safe.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items: Map[T, None] = Map((item, None) for item in items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash()

    def __repr__(self) -> str:
        return f"PersistentSet({list(self)})"

    def with_item(self, item: T) -> PersistentSet[T]:
        """This set and ``item``."""
        return self._of(self._items.set(item, None))

    def without(self, item: T) -> PersistentSet[T]:
        """This set but ``item``, which need not be in it."""
        return self._of(self._items.delete(item)) if item in self._items else self

    @staticmethod
    def _of(items: Map[T, None]) -> PersistentSet[T]:
        made: PersistentSet[T] = PersistentSet.__new__(PersistentSet)
        made._items = items
        return made


def without(items: Map[T, Any], key: T) -> Map[T, Any]:
    """The map but ``key``, which need not be in it."""
    return items.delete(key) if key in items else items
