"""Megatron's own checkpoints while a session trains: when one counts, and which is still owed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints


class Saves:
    """Calls save_checkpoint() and tells when what it wrote can be fallen back to.

    With ``--async-save`` a checkpoint counts when it is finalised. ``unfinished`` is the iteration
    of one that is not (0: none); it travels with the state, so that after a recovery, which drops
    what was being written, all roles know that a checkpoint is owed.
    """

    def __init__(self, announce: Callable[[Path, int], None]) -> None:
        self.unfinished = 0
        self.owed = False
        self._announce = announce

    def write(
        self, original: Callable[..., Any], iteration: int, args: Any, kwargs: Any, lasting: bool
    ) -> None:
        """Write one checkpoint, or start to. Collective. ``lasting``: not one of those that
        Megatron keeps only until the next."""
        from megatron.training import get_args

        failpoints.hit("save.begin")
        original(*args, **kwargs)
        failpoints.hit("save.written")
        self.owed = False
        if get_args().async_save:
            self.unfinished = iteration if lasting else self.unfinished
        elif lasting:
            self._announce(checkpoint_directory(iteration), iteration)

    def look(self) -> None:
        """Notice that an asynchronous save is finalised. All roles see it at the same moment."""
        from megatron.training import async_utils

        if self.unfinished and not self.owed and async_utils.is_empty_async_queue():
            self._announce(checkpoint_directory(self.unfinished), self.unfinished)
            self.unfinished = 0

    def abandon(self) -> None:
        """After an interrupt: stop writers; what they were writing is owed."""
        from megatron.core.dist_checkpointing.strategies import filesystem_async
        from megatron.training import async_utils

        queue = async_utils._async_calls_queue
        callers = {id(call.async_caller): call.async_caller for call in queue.async_calls}
        for caller in callers.values():
            caller.close(abort=True)
        async_utils._async_calls_queue = type(queue)(persistent=queue.persistent)
        # What an aborted writer has put there would be taken for the next one's result.
        filesystem_async._results_queue = None

    def restore(self, unfinished: int) -> None:
        """As the restored generation had it."""
        self.unfinished = unfinished
        self.owed = unfinished > 0


def checkpoint_directory(iteration: int) -> Path:
    """Where Megatron writes a distributed checkpoint (checkpointing.py, get_checkpoint_name)."""
    from megatron.training import get_args

    return Path(get_args().save).absolute() / f"iter_{iteration:07d}"
