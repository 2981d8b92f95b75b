"""Local connections of a vault."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path

import pytest

from deadpool_megatron.vault.net.links import Link, LinkServer, listening_at
from tests.common.threads import short_of_threads

SECONDS = 10.0


def refuses_once_and_serves_the_next(lacking: list[str], path: Path) -> None:
    """``lacking``: what has been lacking; ``path``: of the socket."""
    served = threading.Event()

    def dialogue(_link: Link, _stopping: threading.Event) -> None:
        served.set()

    listener = listening_at(path)
    server = LinkServer(listener, dialogue)
    server.start()
    try:
        with socket.socket(socket.AF_UNIX) as refused:
            refused.settimeout(SECONDS)
            refused.connect(str(path))
            assert refused.recv(1) == b"", "told at once, to come again"
        assert lacking
        with socket.socket(socket.AF_UNIX) as taken:
            taken.connect(str(path))
            assert served.wait(SECONDS)
    finally:
        server.stop()
        listener.close()


def test_a_moment_without_threads_does_not_end_the_vault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuses_once_and_serves_the_next(short_of_threads(monkeypatch, "local-"), tmp_path / "s")


def test_a_moment_without_descriptors_does_not_end_the_vault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection takes two of them."""
    lacking = list[str]()
    dup = socket.socket.dup

    def dup_or_not(connection: socket.socket) -> socket.socket:
        if not lacking:
            lacking.append("descriptors")
            raise OSError(errno.EMFILE, "Too many open files")
        return dup(connection)

    monkeypatch.setattr(socket.socket, "dup", dup_or_not)
    refuses_once_and_serves_the_next(lacking, tmp_path / "s")
