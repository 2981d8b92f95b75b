"""The iterations that are exported where the user gave an interval. Pure."""

from __future__ import annotations

from deadpool_megatron.layout.records import next_due

# Iterations between an order and the iteration that it exports.
MIN_MARGIN = 2
MAX_MARGIN = 64


class ExportInterval:
    """The iterations that the interval of exports requires, and when each of them is ordered.

    An ordered export holds memory on every node, and any recovery ends it. So the order is sent
    only a few iterations ahead. How many depends on the iterations between two reads of the
    reports, which trail training and are read a few times a second.
    """

    def __init__(self, iterations: int) -> None:
        """``iterations``: from one export to the next; 0 for none."""
        self._iterations = iterations
        # The iteration to export next; 0: not chosen yet. It stays the same until it is pinned, or
        # cannot be pinned in this epoch.
        self._awaited = 0
        self._tried = 0
        self._missed: tuple[int, int] | None = None  # the epoch and the iteration
        # The last two advances of the reports. The smaller counts, as an advance after a pause is
        # too large.
        self._newest = 0
        self._advances = (1, 1)

    def observe(self, newest: int) -> None:
        """Take, at each tick, the last iteration that is known to be complete."""
        if newest > self._newest:
            self._advances = (self._advances[1], newest - self._newest)
        elif newest < self._newest:
            self._awaited = 0  # recomputed iterations after a rollback are due again
        self._newest = newest

    def due(self, epoch: int, every: int, margin: int) -> int | None:
        """Return the iteration to order now, if any. ``margin``: distance from the newest iteration
        to the first that can be pinned, which is ordered if the due iteration is earlier.
        ``every``: the cadence of the epoch.
        """
        if not self._iterations:
            return None
        if self._missed is not None and epoch > self._missed[0]:
            # A recovery was the obstacle, or may have removed the obstacle.
            self._awaited, self._missed = self._missed[1], None
        if not self._awaited:
            after = max(self._newest + MIN_MARGIN, self._tried + 1)
            self._awaited = next_due(after, self._iterations)
        lead = min(MIN_MARGIN + 2 * min(self._advances), MAX_MARGIN)
        if next_due(self._awaited, every) > self._newest + lead:
            return None
        return next_due(max(self._awaited, self._newest + margin), every)

    def note_pinned(self, iteration: int) -> None:
        """Note a pinned iteration, by an order of the interval or by another order for the same
        directory."""
        self._tried = max(self._tried, iteration)
        if iteration >= self._awaited:
            self._awaited, self._missed = 0, None

    def note_failed(self, epoch: int, iteration: int) -> None:
        """Note an iteration that was not pinned, and is not tried again in this epoch."""
        self._tried = max(self._tried, iteration)
        self._awaited, self._missed = 0, (epoch, iteration)
