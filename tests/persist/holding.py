"""Waits of a training process before some iterations: an export takes seconds, iterations of a tiny
model take none, and the run must not be over before."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

_PATIENCE_SECONDS = 90.0


def waits_of(text: str) -> dict[int, Path]:
    """``ITERATION=PATTERN[,...]``: before it, wait until a file whose name fits is there."""
    pairs = (one.split("=") for one in text.split(",") if one)
    return {int(iteration): Path(pattern) for iteration, pattern in pairs}


def hold(waits: Mapping[int, Path], iteration: int) -> None:
    """Wait before an iteration, if it is one of those."""
    limit = time.monotonic() + _PATIENCE_SECONDS
    pattern = waits.get(iteration)
    while pattern is not None and not list(pattern.parent.glob(pattern.name)):
        assert time.monotonic() < limit, f"nothing came to {pattern}"
        time.sleep(0.02)
