"""Loaded by each interpreter of a run with faults: fsync is slow while a file demands it."""

from __future__ import annotations

import os
import time

_SIGN = os.environ.get("DEADPOOL_SOAK_SLOW_FSYNC", "")
_SLOW_SECONDS = 0.7
_fsync = os.fsync


def _slow_fsync(handle: int) -> None:
    if os.access(_SIGN, os.F_OK):
        time.sleep(_SLOW_SECONDS)
        os.close(os.open(f"{_SIGN}.seen", os.O_CREAT))
    _fsync(handle)


if _SIGN:
    os.fsync = _slow_fsync  # type: ignore[assignment]
