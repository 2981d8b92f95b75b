"""Threads that may be refused: what strangers, or others on the host, can make short must end no
vault."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def begin_thread(name: str, target: Callable[[], None]) -> bool:
    """Run ``target`` in a thread of its own, which does not hold the process; False, and said in
    the log, where the host has none left at the moment, as at a limit of processes.
    """
    try:
        threading.Thread(target=target, name=name, daemon=True).start()
    except RuntimeError as error:
        log.warning("%s: %s", name, error)
        return False
    return True
