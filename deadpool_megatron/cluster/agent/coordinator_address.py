"""The address of the coordinator, as far as this agent knows; asked again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deadpool_megatron.cluster.process.files import FileWorker
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, address_in

Address = tuple[str, int]
_READ_SECONDS = 5.0
_MOST_BYTES = 1 << 16


class CoordinatorAddress:
    """``seen()``: what the standby saw in the journal. Without that the address is read from
    ``coordinator.json`` through ``files``, so that no run directory that hangs holds the agent up;
    ``fixed``: where that is not shared. For the agent's loop.
    """

    def __init__(
        self,
        run: RunDirectory,
        files: FileWorker,
        fixed: Address | None,
        seen: Callable[[], Address | None],
    ) -> None:
        self._path = run.coordinator
        self._files = files
        self._fixed = fixed
        self._seen = seen
        self._told: Address | None = None
        self._reading: asyncio.Task[None] | None = None

    def newest(self) -> Address | None:
        """Returns it, None as long as it is not known; does not block."""
        seen = self._seen()
        if seen is not None:
            return seen
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read())
        return self._told or self._fixed

    async def _read(self) -> None:
        try:
            text = await self._files.read(self._path, 0, _MOST_BYTES, _READ_SECONDS)
        except TimeoutError:
            return
        self._told = address_in(text) or self._told
