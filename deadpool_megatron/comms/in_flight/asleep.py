"""Tells whether the threads of gloo sleep: an operation of a sleeping thread does not proceed.

Linux only. A thread that could run is in state R, also while it waits for a processor, so a busy
machine is not mistaken for a sleeping thread.
"""

from __future__ import annotations

import re
import time
from collections.abc import Set
from pathlib import Path

#: how torch and gloo name them: they run the collectives, and the connections of a device
_WORKERS = frozenset({"pt_gloo_runloop"})
_LOOPS = frozenset({"gloo_tcp_loop"})
_SAMPLES = 4
_BETWEEN_SECONDS = 0.025
_STATUS = re.compile(r"^State:\s+(\S).*?^voluntary_ctxt_switches:\s+(\d+)", re.M | re.S)


def stays_asleep(others: Set[int]) -> bool:
    """Whether no gloo worker, nor any of the thread ids ``others``, ran for a while (0.1 s).

    Answers after the loop of each device was seen idle once: what it had taken from connections
    before these went is then delivered, and whom it woke is no longer asleep.
    """
    for _ in range(_SAMPLES):
        if _switches(_LOOPS, frozenset()) is not None:
            break
        time.sleep(_BETWEEN_SECONDS / 5)
    else:
        return False
    first = _switches(_WORKERS, others)
    for _ in range(_SAMPLES):
        if first is None:
            return False
        time.sleep(_BETWEEN_SECONDS)
        if _switches(_WORKERS, others) != first:
            return False
    return True


def _switches(names: Set[str], others: Set[int]) -> dict[int, int] | None:
    """Thread id -> number of times it went to sleep; None if one of them is not sleeping."""
    switches: dict[int, int] = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            number = int(task.name)
            # A name that a program gives is cut at 15 bytes, in the middle of a letter.
            name = (task / "comm").read_text(errors="replace").strip()
            if name not in names and number not in others:
                continue
            found = _STATUS.search((task / "status").read_text(errors="replace"))
        except OSError:
            continue  # the thread has ended
        if found is None or found[1] != "S":
            return None
        switches[number] = int(found[2])
    return switches
