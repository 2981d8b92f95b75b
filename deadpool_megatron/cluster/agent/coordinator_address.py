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
    """``seen()``: what the standby saw in the journal. Without that the address is read from
    ``coordinator.json``, by a thread, so that no run directory that hangs holds the agent up;
    ``fixed``: where that is not shared. For the agent's loop.
    """

    def __init__(
        self, run: RunDirectory, fixed: Address | None, seen: Callable[[], Address | None]
    ) -> None:
        self._text = TimedRead(partial(read, run.coordinator, 0, _MAX_BYTES))
        self._seen = seen
        self._told = fixed

    def newest(self) -> Address | None:
        """Returns it, None as long as it is not known; does not block."""
        if (seen := self._seen()) is not None:
            return seen
        with contextlib.suppress(TimeoutError):  # the next one finds what is being read
            self._told = address_in(self._text.look(0.0)) or self._told
        return self._told
