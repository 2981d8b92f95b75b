"""The waits and the progress of communicators, for the threads that watch them."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from deadpool_megatron.comms import inner
from deadpool_megatron.comms.in_flight.device_time import StreamWaits
from deadpool_megatron.comms.in_flight.epoch import Epoch, Progress


class Observation:
    """The progress and the waits of communicators. Any thread."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._current: Epoch | None = None
        self._attaching: Epoch | None = None

    @property
    def _newest(self) -> Epoch | None:
        return self._attaching or self._current

    def waiting_for(self) -> tuple[str, str, int] | None:
        """Return the (group, operation, sequence number) in which the main thread waits, or else
        another thread; None if no thread waits.

        Collectives and messages of a group are numbered separately, from 1 in each epoch. The rank
        of a group with the lowest number keeps the other ranks waiting.
        """
        waits = {} if (epoch := self._newest) is None else dict(epoch.waits)
        if not waits:
            return None
        work = waits.get(threading.main_thread().ident or 0) or next(iter(waits.values()))
        return work.place, work.operation, work.sequence

    def positions(self) -> Mapping[str, inner.Position] | None:
        """Return the device's progress with the operations of each group. Expensive.

        None where waits hold the host: then :meth:`waiting_for` returns the place.
        """
        fabrics = [] if (epoch := self._newest) is None else list(epoch.fabrics.values())
        known = [found for fabric in fabrics if (found := fabric.positions()) is not None]
        return dict(item for found in known for item in found.items()) if known else None

    def report_faults(self) -> None:
        """Report a fault that no thread has met, at most once in an epoch."""
        if (epoch := self._current) is not None:
            for fabric in list(epoch.fabrics.values()):
                if (found := fabric.fault()) is not None and not epoch.closed:
                    epoch.report(*found)

    def operation_counts(self) -> Mapping[str, inner.OperationCounts]:
        """Return how many operations the host has begun, by group, where devices do not run
        them."""
        groups = [] if (epoch := self._newest) is None else list(epoch.groups)
        return {
            group.place: found
            for group in groups
            if (found := group.operation_counts()) is not None
        }

    def progress(self) -> int:
        """Return the number of finished operations of this process."""
        return self._progress.finished

    def waited_seconds(self) -> float:
        """Return how long the main thread has waited in operations that block the host."""
        return self._progress.waited_seconds

    @property
    def stream_waits(self) -> StreamWaits:
        """Return how long streams wait in operations that do not block the host."""
        return self._progress.stream_waits
