"""The coordinator searches for garbage itself, a little at a time."""

import gc
import weakref

import pytest

from deadpool_megatron.cluster.coordinator import garbage
from deadpool_megatron.cluster.coordinator.garbage import GarbageSearch


class Circle:
    """Refers to itself."""

    def __init__(self) -> None:
        self.it = self


@pytest.fixture
def search():
    yield GarbageSearch(0.0)
    gc.unfreeze()
    gc.enable()


def test_new_garbage_is_freed_at_the_next_tick(search):
    search.tick(1.0)
    circle = weakref.ref(Circle())
    assert circle() is not None
    search.tick(2.0)
    assert circle() is None


def test_older_garbage_is_freed_within_an_hour(search):
    gc.freeze()  # objects of the tests before
    circle = Circle()
    seen = weakref.ref(circle)
    search.tick(1.0)
    del circle
    search.tick(2.0)
    assert seen() is not None
    search.tick(3601.0)
    assert seen() is None


def test_objects_of_all_roles_are_never_looked_through(search, monkeypatch):
    monkeypatch.setattr(garbage, "_MAX_NEW_OBJECTS", 1000)
    search.tick(1.0)
    inventories = [[number] for number in range(2000)]
    looks: list[str] = []
    gc.callbacks.append(look := lambda phase, facts: looks.append(phase))
    try:
        search.tick(2.0)
        search.tick(3.0)
    finally:
        gc.callbacks.remove(look)
    assert looks == ["start", "stop"]  # second tick, with next to nothing in it
    assert not any(found is inventories[0] for found in gc.get_objects())
