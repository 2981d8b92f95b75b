"""Futures that end with the epoch of their operation.

DistributedDataParallel waits in C++ for the future of an operation, where nobody can leave it. Most
of gloo's operations end when their connections are cut; one in some hundreds does not, before its
timeout.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from deadpool_megatron.comms.in_flight.epoch import Epoch


def ending_with(epoch: Epoch, inner: Any, operation: str) -> Any:
    """A future with the outcome of ``inner``; when ``epoch`` is closed before, it ends at once.

    Its error is then a RuntimeError that quotes EpochClosed. Tensors may still be written to.
    """
    start: torch.futures.Future[None] = torch.futures.Future()
    once = threading.Lock()
    serial = next(epoch.serials)

    def end(*_: object) -> None:
        if once.acquire(blocking=False):
            epoch.ends.pop(serial, None)
            start.set_result(None)

    def outcome(_: object) -> Any:
        epoch.check(operation)
        return inner.value()

    outer = start.then(outcome)
    epoch.ends[serial] = end
    inner.add_done_callback(end)
    if epoch.closed:
        end()
    return outer
