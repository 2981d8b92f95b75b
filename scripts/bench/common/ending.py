"""A bench that is told to end takes its runs along."""

from __future__ import annotations

import signal
import sys


def end_in_order() -> None:
    """From here on SIGTERM ends this process as an exception does, through every ``finally``: else
    the runs that it watches, in sessions of their own, would go on without it.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
