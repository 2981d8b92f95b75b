"""What one end has said to the other and what that has not acknowledged yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator


class Outbox:
    """Numbered frames in order, the oldest first. Not thread-safe."""

    def __init__(self, most_frames: int, most_bytes: int) -> None:
        self._most_frames = most_frames
        self._most_bytes = most_bytes
        self._frames: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    @property
    def is_over_full(self) -> bool:
        """Whether it holds more than what was allowed."""
        return len(self._frames) > self._most_frames or self._bytes > self._most_bytes

    def __len__(self) -> int:
        return len(self._frames)

    def __iter__(self) -> Iterator[tuple[int, bytes]]:
        return iter(self._frames)

    def add(self, number: int, frame: bytes) -> None:
        """Keep a frame; ``number`` is higher than all before."""
        self._frames.append((number, frame))
        self._bytes += len(frame)

    def drop_oldest(self) -> None:
        """Give the oldest frame up."""
        self._bytes -= len(self._frames.popleft()[1])

    def acknowledge(self, number: int) -> None:
        """The other end has taken everything up to ``number``."""
        while self._frames and self._frames[0][0] <= number:
            self.drop_oldest()
