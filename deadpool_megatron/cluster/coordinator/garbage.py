"""The search for cyclic garbage in a coordinator, a little at a time."""

from __future__ import annotations

import gc

# A search for garbage among so many takes some milliseconds.
_MAX_NEW_OBJECTS = 20_000
_MAX_OLD_OBJECTS = 100_000
_OLD_SECONDS = 3600.0


class GarbageSearch:
    """The search for objects that refer to each other in a circle, a little at a time.

    Records, inventories and layouts of all roles are millions of objects without a circle among
    them. Python counts how many more objects there are than before: where new ones take the place
    of old ones that is none, until it looks through hundreds of thousands at once, and nobody is
    answered. So the coordinator looks itself, in each tick, at what is new. ``now``: seconds, of a
    clock that only goes forward.
    """

    def __init__(self, now: float) -> None:
        gc.disable()
        self._old_at = now + _OLD_SECONDS

    def tick(self, now: float) -> None:
        """Look through the new objects, and once an hour through those that were new before. More
        than can be looked through in a moment are those of all roles: nobody looks at them again.
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
