"""How long a role works for an iteration without waiting for others."""

from __future__ import annotations

import time
from collections.abc import Callable


class OwnTimeMeter:
    """Main thread; :attr:`sample` may be read by any. ``waited()`` answers the seconds which the
    main thread has waited so far, in communication or for protection.

    With NCCL the host does not wait in operations but in reads of results, which are not seen here.
    """

    def __init__(self, waited: Callable[[], float]) -> None:
        # (finished iterations, seconds of all of them), since the epoch began.
        self.sample = (0, 0.0)
        self._waited = waited
        self._began = 0.0
        self._waited_before = 0.0

    def reset(self) -> None:
        """A new epoch begins."""
        self.sample = (0, 0.0)

    def begin(self) -> None:
        """An iteration begins."""
        self._waited_before = self._waited()
        self._began = time.monotonic()

    def end(self) -> None:
        """It is finished."""
        waited = self._waited() - self._waited_before
        own = max(0.0, time.monotonic() - self._began - waited)
        iterations, seconds = self.sample
        self.sample = (iterations + 1, seconds + own)
