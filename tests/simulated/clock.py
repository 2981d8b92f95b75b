"""Simulated time: calls that are due, in order, and draws that depend only on their cause."""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Message = TypeVar("Message")


class Clock:
    """Calls that are due later. ``delay_seconds``: the mean of a delay; 0: all is due at once, in
    the order of the calls."""

    def __init__(self, seed: str, delay_seconds: float) -> None:
        self.seed, self.delay_seconds = seed, delay_seconds
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._streams: dict[tuple[object, ...], random.Random] = {}

    def stream(self, *cause: object) -> random.Random:
        """Return the draws of a cause: a hazard that is left out changes those of no other."""
        if cause not in self._streams:
            self._streams[cause] = random.Random(f"{self.seed} {cause}")
        return self._streams[cause]

    def after_delay(self, call: Callable[[], object], *cause: object) -> None:
        """Call later. One delay in fifty is a hundred times as long as the others."""
        seconds = 0.0
        if self.delay_seconds:
            draw = self.stream(*cause)
            seconds = draw.expovariate(1 / self.delay_seconds)
            seconds *= 100 if draw.random() < 0.02 else 1
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), call))

    @property
    def next_at(self) -> float:
        """Return when the next call is due; infinite if none is."""
        return self._due[0][0] if self._due else math.inf

    def call_next(self) -> None:
        """Let time pass until the next call, and make it."""
        at, _, call = heapq.heappop(self._due)
        self.now = max(self.now, at)
        call()


class Channel(Generic[Message]):
    """One direction of a connection: messages arrive in the order in which they were sent."""

    def __init__(self, clock: Clock, deliver: Callable[[Message], object], *cause: object) -> None:
        self.clock, self.deliver, self.cause = clock, deliver, cause
        self.waiting: deque[Message] = deque()

    def send(self, *messages: Message) -> None:
        for message in messages:
            self.waiting.append(message)
            self.clock.after_delay(self.arrive, *self.cause)

    def arrive(self) -> None:
        if self.waiting:
            self.deliver(self.waiting.popleft())

    def reset(self, *messages: Message) -> None:
        """Lose what is on its way, and send these messages instead."""
        self.waiting.clear()
        self.send(*messages)
