"""The planned pause: all roles stand still after one and the same iteration, protected.

The order comes on the watcher thread while the main thread trains, so a role may already be in the
next iteration. It must say so at once: it cannot finish that iteration without the roles that do
stand still. The coordinator then orders a later iteration, and who stands still goes on to it.
"""

from __future__ import annotations

import threading


class PausePoint:
    """The iteration to stand still after. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: int | None = None
        self._started = 0

    def order(self, iteration: int) -> int | None:
        """Stand still after ``iteration`` (the latest order counts).

        Returns the iteration that has been started already when it is too late for that.
        """
        with self._lock:
            if self._started > iteration:
                self._wanted = None
                return self._started
            self._wanted = iteration
            return None

    def may_start(self, iteration: int) -> bool:
        """Return whether to start ``iteration``; from then on an order to stand still before it is
        late.

        False: stand still, and ask again until it is true.
        """
        with self._lock:
            if self._wanted is not None and self._wanted < iteration:
                return False
            self._started = iteration
            return True

    def reset(self) -> None:
        """The epoch is over, and with it all orders and what was started."""
        with self._lock:
            self._wanted = None
            self._started = 0
