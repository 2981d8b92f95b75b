"""Local connections of a vault."""

from __future__ import annotations

import socket
import threading

import pytest

from deadpool_megatron.vault.net.links import Link, LinkServer


def test_a_moment_without_threads_does_not_end_the_vault(monkeypatch: pytest.MonkeyPatch) -> None:
    served, short = threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_or_not(thread: threading.Thread) -> None:
        if thread.name.startswith("local-") and not short.is_set():
            short.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def dialogue(_link: Link, _stopping: threading.Event) -> None:
        served.set()

    listener = socket.create_server(("127.0.0.1", 0))
    server = LinkServer(listener, dialogue)
    server.start()
    monkeypatch.setattr(threading.Thread, "start", start_or_not)
    try:
        with socket.create_connection(listener.getsockname()) as refused:
            refused.settimeout(10.0)
            assert refused.recv(1) == b"", "told at once, to come again"
        assert short.is_set()
        with socket.create_connection(listener.getsockname()):
            assert served.wait(10.0)
    finally:
        server.stop()
        listener.close()
