"""A host on which for a moment no thread can be started."""

from __future__ import annotations

import threading

import pytest


def short_of_threads(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """The first thread of a name that begins so is refused; answers who was, once it has been."""
    start, refused = threading.Thread.start, list[str]()

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name.startswith(name) and not refused:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    return refused
