"""What an interrupted step leaves on the stack: frames that hold its activations."""

from __future__ import annotations

import traceback


def forget_frames(error: BaseException) -> None:
    """Drop the frames of an exception and of all that led to it. They hold tensors, and sockets.

    To be called when nothing can write into that memory any more. Frames that are still running
    (the caller's own) stay.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        # A cause need not be the context: somebody may have kept an older exception.
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
