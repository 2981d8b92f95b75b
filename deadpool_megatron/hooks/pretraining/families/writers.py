"""Writers of asynchronous saves, as every version so far has them."""

from __future__ import annotations

from typing import Any


def abort_writers(queue: Any) -> None:
    """Stop what an AsyncCallsQueue has under way, and drop the results."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for caller in {id(call.async_caller): call.async_caller for call in queue.async_calls}.values():
        caller.close(abort=True)
    # What an aborted writer has put there would be taken for the next one's result.
    filesystem_async._results_queue = None
