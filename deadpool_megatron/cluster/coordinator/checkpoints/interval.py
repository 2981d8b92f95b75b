"""Iterations that the interval of exports asks for, and when each of them is ordered. Pure.

An order holds memory on every node and is ended by any recovery, so that it comes a few iterations
before its own, and not as soon as the one before is over. What was reported last trails behind
training, and somebody looks a few times in a second only: how many iterations go by from one look
to the next says how many are few.
"""

from __future__ import annotations

from dataclasses import dataclass

from deadpool_megatron.layout.cadence import next_due

# Iterations between an order and the one it is about, at least.
FIRST_MARGIN = 2
# And at most, however fast they are.
LONGEST_MARGIN = 64


@dataclass(frozen=True)
class Missed:
    """An iteration that was not set aside in an epoch."""

    epoch: int
    iteration: int


class Interval:
    """See the module text. ``saw`` is called at each look, whether something may begin or not."""

    def __init__(self, iterations: int) -> None:
        """``iterations``: from one export to the next; 0 for none."""
        self._iterations = iterations
        # The one that is exported next; 0: it is not chosen. It stays until it was set aside, or
        # cannot be in this epoch.
        self._awaited = 0
        self._tried = 0
        self._missed: Missed | None = None
        # The last two advances of what is reported: a long one after a pause is no pace.
        self._newest = 0
        self._advances = (1, 1)

    def saw(self, newest: int) -> None:
        """``newest``: the last iteration that is known to be over."""
        if newest > self._newest:
            self._advances = (self._advances[1], newest - self._newest)
        elif newest < self._newest:
            self._awaited = 0  # what is computed again after a return to an older one is due again
        self._newest = newest

    def due(self, epoch: int, every: int, margin: int) -> int | None:
        """The iteration that is to be ordered now. ``margin``: so many after the newest one can be
        had; one that is nearer, or over, is made up for by the next that can. ``every``: the
        cadence of the epoch.
        """
        if not self._iterations:
            return None
        if (missed := self._missed) is not None and epoch > missed.epoch:
            # A recovery came in between, or may have given what was wanting.
            self._awaited, self._missed = missed.iteration, None
        if not self._awaited:
            after = max(self._newest + FIRST_MARGIN, self._tried + 1)
            self._awaited = next_due(after, self._iterations)
        lead = min(FIRST_MARGIN + 2 * min(self._advances), LONGEST_MARGIN)
        if next_due(self._awaited, every) > self._newest + lead:
            return None
        return next_due(max(self._awaited, self._newest + margin), every)

    def taken(self, iteration: int) -> None:
        """It was set aside, by an order of the interval or another one to the same place."""
        self._tried = max(self._tried, iteration)
        if iteration >= self._awaited:
            self._awaited, self._missed = 0, None

    def failed(self, epoch: int, iteration: int) -> None:
        """It was not set aside, and is not tried again in this epoch."""
        self._tried = max(self._tried, iteration)
        self._awaited, self._missed = 0, Missed(epoch, iteration)
