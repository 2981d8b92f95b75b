"""More vaults than a vault takes connections of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import server
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.net.transport import Channel
from deadpool_megatron.vault.server import Server
from deadpool_megatron.wire.framing import ConnectionClosed
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import wait_until


class Crowd:
    """One server, and channels to it."""

    def __init__(self, directory: Path) -> None:
        self.state = VaultState(0, directory, Settings(), lambda _: None)
        self.network = FakeNetwork()
        self.transport = self.network.transport("fake", 0, 5.0)
        self.server = Server(self.state, self.transport)
        self.server.start()
        self.channels: list[Channel] = []

    def join(self) -> Channel:
        self.channels.append(self.transport.connect(0, "fake", 0))
        return self.channels[-1]

    def stop(self) -> None:
        for channel in self.channels:
            channel.close()
        self.server.stop()
        self.transport.close()


@pytest.fixture
def crowd(tmp_path: Path) -> Iterator[Crowd]:
    running = Crowd(tmp_path)
    yield running
    running.stop()


def ask(channel: Channel) -> None:
    channel.send({"t": "describe", "role": 1})
    assert channel.receive() == {"t": "layout", "layout": None, "elsewhere": []}


def test_who_has_been_silent_for_longest_makes_room(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused for good, a vault could never ship what it owes to this node."""
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 2)
    first, second = crowd.join(), crowd.join()
    wait_until(lambda: len(crowd.server._idle) == 2, "both were let in")
    for channel in (first, second, first):
        ask(channel)
        wait_until(lambda: len(crowd.server._idle) == 2, "both wait for the next message")
    ask(crowd.join())
    with pytest.raises((ConnectionClosed, OSError)):
        ask(second)
    ask(first)
    assert not crowd.state.reports.counters


def test_while_all_are_busy_the_next_one_is_refused(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MOST_CONNECTIONS", 0)
    with pytest.raises((ConnectionClosed, OSError)):
        ask(crowd.join())
    assert crowd.state.reports.counters == {"refused: too many connections": 1}


def test_a_moment_without_threads_costs_one_connection(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(server, "begin_thread", lambda name, target: False)
        refused = crowd.join()
        with pytest.raises((ConnectionClosed, OSError)):
            ask(refused)
    assert not crowd.server._channels
    assert not crowd.server._strangers
    ask(crowd.join())
