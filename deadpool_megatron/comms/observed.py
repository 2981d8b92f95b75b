"""What a watching thread asks of the communicators of its process."""

from __future__ import annotations

from collections.abc import Mapping

from deadpool_megatron.comms.in_flight.epoch import Epoch, Progress
from deadpool_megatron.comms.in_flight.stream_waits import StreamWaits
from deadpool_megatron.comms.inner import Begun, Position


class Observed:
    """The part of the communicators that tells what they wait in. Any thread."""

    def __init__(self) -> None:
        self._progress = Progress()
        self._current: Epoch | None = None
        self._attaching: Epoch | None = None

    def waiting_for(self) -> tuple[str, str, int] | None:
        """(group, operation, sequence number) in which the main thread waits, or another one.

        Collectives and messages of a group are numbered separately, from 1 in each epoch: among
        the ranks of a group, the one with the lowest number keeps the others waiting. Any thread.
        """
        epoch = self._attaching or self._current
        return None if epoch is None else epoch.waiting()

    def positions(self) -> Mapping[str, Position] | None:
        """How far the device is with the operations of each group; None where waits hold the host,
        and :meth:`waiting_for` says it. Any thread; not often.
        """
        epoch = self._attaching or self._current
        return None if epoch is None else epoch.positions()

    def look(self) -> None:
        """Report a fault that no thread has run into, once for an epoch. Any thread."""
        epoch = self._current
        if epoch is not None:
            epoch.look()

    def begun(self) -> Mapping[str, Begun]:
        """How many operations the host has begun in each group in which it waits. Any thread."""
        epoch = self._attaching or self._current
        return {} if epoch is None else epoch.begun()

    def progress(self) -> int:
        """Number of finished operations of this process. Any thread."""
        return self._progress.finished

    def waited_seconds(self) -> float:
        """How long the main thread has waited in operations that block the host. Any thread."""
        return self._progress.waited_seconds

    @property
    def stream_waits(self) -> StreamWaits:
        """How long streams wait in operations that do not block the host."""
        return self._progress.stream_waits
