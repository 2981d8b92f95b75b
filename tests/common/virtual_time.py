"""An event loop whose time costs nothing."""

import asyncio
import selectors
from typing import Any


class _Selector(selectors.SelectSelector):
    """Returns ready events; without any, advances the time."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found and timeout is None:
            raise AssertionError("nothing is left to wait for")
        self.now += 0.0 if found else max(0.0, timeout or 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time jumps to the next timer when nothing is left to do."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now
