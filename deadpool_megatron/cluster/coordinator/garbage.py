"""The search for cyclic garbage in a coordinator, a little at a time."""

from __future__ import annotations

import gc

# A search for garbage among this many objects takes some milliseconds.
_MAX_NEW_OBJECTS = 20_000
_MAX_OLD_OBJECTS = 100_000
_OLD_SECONDS = 3600.0


class GarbageSearch:
    """Incremental cyclic garbage collection.

    Records, inventories and layouts of all roles are millions of objects without a cycle among
    them. Python's own collector counts net new objects. While new objects replace old objects it
    does nothing; then it traverses hundreds of thousands of objects at once, and no request is
    answered in that time. So the coordinator itself collects in each tick, among the new objects.
    ``now``: seconds of a monotonic clock.
    """

    def __init__(self, now: float) -> None:
        gc.disable()
        self._old_at = now + _OLD_SECONDS

    def tick(self, now: float) -> None:
        """Collect among the new objects, and once an hour among the older objects. If they are too
        many for a short search, they are the state of all roles: freeze them, so that they are
        never searched again.
        """
        if len(gc.get_objects(0)) > _MAX_NEW_OBJECTS:
            gc.freeze()
            return
        gc.collect(1)
        if now >= self._old_at:
            self._old_at = now + _OLD_SECONDS
            if len(gc.get_objects(2)) > _MAX_OLD_OBJECTS:
                gc.freeze()
            else:
                gc.collect()
