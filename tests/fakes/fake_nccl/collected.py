"""NCCL's blocks of coalesced operations, simulated: a thread collects, the block's end launches.

The number of open blocks belongs to the thread, not to the epoch, a group or a communicator. A
thread that has left a block without its end launches nothing any more, and gets no error.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Freeable(Protocol):
    """A communicator, as far as the end of a block knows it."""

    aborted: bool


class FreedCommunicatorError(AssertionError):
    """A thread continued in a communicator that an abort has freed: a crash in NCCL."""


class Collected(threading.local):
    """The open blocks of the calling thread, and what was called in them."""

    def __init__(self) -> None:
        self.depth = 0
        self._calls: list[tuple[Freeable, Callable[[], Any]]] = []

    def add(self, communicator: Freeable, launch: Callable[[], Any]) -> None:
        """Launch at the end of the outermost block."""
        self._calls.append((communicator, launch))

    def end(self) -> list[Any]:
        """End the innermost block. Returns the results of the launches for the outermost only."""
        self.depth -= 1
        if self.depth:
            return []
        calls, self._calls = self._calls, []
        if any(communicator.aborted for communicator, _ in calls):
            raise FreedCommunicatorError("the end of a block after the abort of its communicator")
        return [launch() for _, launch in calls]

    def assert_none_open(self) -> None:
        """Raise AssertionError if the calling thread would launch nothing."""
        if self.depth:
            raise AssertionError(f"{self.depth} blocks are open here: this thread launches nothing")


collected = Collected()
