"""A network of vaults in one process: addresses are names, links go over the loopback.

Who listens looks often whether it is to end.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from deadpool_megatron.vault.transport import Channel, Transport
from deadpool_megatron.wire.sealed_records import RecordSocket
from tests.common.wait import MAX_WAIT_SECONDS

_LOOK_SECONDS = 0.005


class QuickListener(socket.socket):
    """Where members find a vault of this process."""

    def settimeout(self, value: float | None) -> None:
        super().settimeout(_LOOK_SECONDS if value else value)


def connected() -> tuple[RecordSocket, RecordSocket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
    for end in ends:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return RecordSocket.of(ends[0]), RecordSocket.of(ends[1])


class FakeNetwork:
    """All vaults of one process; what is cut answers nobody."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._waiting: dict[tuple[str, int], list[RecordSocket]] = {}
        self._dialled: list[tuple[str, RecordSocket]] = []
        self.cut: set[tuple[str, int]] = set()
        # From one address to another, as a broken route is.
        self.cut_routes: set[tuple[tuple[str, int], tuple[str, int]]] = set()

    def transport(self, host: str, port: int, deadline_seconds: float) -> FakeTransport:
        """A vault's end; it listens at once."""
        with self._condition:
            self._waiting[host, port] = []
        return FakeTransport(self, (host, port), deadline_seconds)

    def dial(self, address: tuple[str, int], origin: tuple[str, int]) -> RecordSocket:
        """Raises ConnectionRefusedError for an address nobody listens on, or which is cut."""
        ours, theirs = connected()
        with self._condition:
            cut = address in self.cut or (origin, address) in self.cut_routes
            if address not in self._waiting or cut:
                ours.close()
                theirs.close()
                raise ConnectionRefusedError(f"nobody listens on {address}")
            self._waiting[address].append(theirs)
            self._dialled.append((address[0], ours))
            self._condition.notify_all()
        return ours

    def sever(self, host: str) -> None:
        """All connections to a host end, and it answers nobody until ``cut`` is cleared."""
        with self._condition:
            self.cut |= {address for address in self._waiting if address[0] == host}
            for _, end in [each for each in self._dialled if each[0] == host]:
                with contextlib.suppress(OSError):  # closed already
                    end.shutdown(socket.SHUT_RDWR)

    def answer(self, address: tuple[str, int], seconds: float) -> RecordSocket | None:
        """The next connection dialled to ``address``."""
        with self._condition:
            queue = self._waiting.get(address, [])
            self._condition.wait_for(lambda: bool(queue), seconds)
            return queue.pop(0) if queue else None

    def forget(self, address: tuple[str, int]) -> None:
        """Nobody listens there any more."""
        with self._condition:
            for connection in self._waiting.pop(address, []):
                connection.close()


class FakeTransport(Transport):
    """See :class:`FakeNetwork`."""

    def __init__(
        self, network: FakeNetwork, address: tuple[str, int], deadline_seconds: float
    ) -> None:
        self._network = network
        self.address = address
        self.interface = address[0]
        self._deadline_seconds = deadline_seconds

    def connect(self, node: int, host: str, port: int) -> Channel:
        connection = self._network.dial((host, port), self.address)
        return Channel(connection, self._deadline_seconds, None, "")

    def accept(self, seconds: float) -> Channel | None:
        connection = self._network.answer(self.address, min(seconds, _LOOK_SECONDS))
        if connection is None:
            return None
        return Channel(connection, self._deadline_seconds, None, "")

    def await_one(self) -> Channel:
        """The next connection, as long as it may take to be dialled on a busy machine."""
        connection = self._network.answer(self.address, MAX_WAIT_SECONDS)
        assert connection is not None, f"nobody dialled {self.address}"
        return Channel(connection, self._deadline_seconds, None, "")

    def close(self) -> None:
        self._network.forget(self.address)
