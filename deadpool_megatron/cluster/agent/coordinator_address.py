"""The address of the coordinator, from the standby or from the run directory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from deadpool_megatron.cluster.process.logs import read
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, address_in
from deadpool_megatron.file_systems import TimedRead

_MAX_BYTES = 1 << 16
Address = tuple[str, int]


class CoordinatorAddress:
    """The newest known address. ``from_standby()`` returns the address that the standby found in
    the journal. If there is none, a thread reads ``coordinator.json``, so that a run directory that
    hangs does not block the agent. ``fixed``: the address where that directory is not shared. For
    the agent's loop.
    """

    def __init__(
        self, run: RunDirectory, fixed: Address | None, from_standby: Callable[[], Address | None]
    ) -> None:
        self._text = TimedRead(partial(read, run.coordinator, 0, _MAX_BYTES))
        self._from_standby = from_standby
        self._known = fixed

    def newest(self) -> Address | None:
        """Return the address, None while it is not known; never block."""
        if (address := self._from_standby()) is not None:
            return address
        with contextlib.suppress(TimeoutError):  # the next call gets the result of this read
            self._known = address_in(self._text.look(0.0)) or self._known
        return self._known
