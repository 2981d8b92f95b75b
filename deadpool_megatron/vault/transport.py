"""Authenticated TCP connections between vaults.

A channel carries frames (JSON objects) and, between them, raw bytes whose number both sides know.
Every call ends within the channel's deadline or raises. The bytes of a requested part go directly
into their slot.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import xxhash

from deadpool_megatron.layout.records import Generation, Source
from deadpool_megatron.vault.errors import MALFORMED, Refusal, Refused
from deadpool_megatron.vault.shm.segment import Segment
from deadpool_megatron.wire import auth, framing
from deadpool_megatron.wire.framing import WireError
from deadpool_megatron.wire.listener import defer_accept
from deadpool_megatron.wire.sealed_records import RecordSocket

# Errors from a vault that cannot be reached, or breaks the protocol.
UNREACHABLE = (OSError, WireError, *MALFORMED)
# No step of an unauthenticated handshake may take longer than this.
HANDSHAKE_SECONDS = 5.0
# TC_PRIO_BULK of linux/pkt_sched.h: queueing disciplines with bands (pfifo_fast, prio, fq) send its
# packets when no packet of the default priority waits. The priority does not leave the host.
_BULK = 2
# The maximum of unsent bytes in a socket: they can no longer give way to training.
_UNSENT_BYTES = 256 << 10
# struct tcp_info of linux/tcp.h: tcpi_busy_time, microseconds with unacknowledged bytes (Linux
# 4.10), and three fields later tcpi_bytes_sent (4.19).
_TCP_INFO_BYTES = 256
_SENT_AT = 168
_SENT = struct.Struct("=Q24xQ")
_SIOCGIFADDR = 0x8915


def interface_of(address: str) -> str:
    """Return the interface whose first IPv4 address this is; empty if there is none."""
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # the interface has no address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def realm_of(run_id: str, node: int) -> str:
    """Return the realm of handshakes with the vault of ``node``. The realms of coordinator and
    other vaults differ, so the handshake proves the identity of the peer."""
    return f"{run_id}/vault{node}"


class Sent(NamedTuple):
    """Kernel counters of one side of a connection."""

    busy_seconds: float = 0.0  # during which sent bytes were not acknowledged yet
    nbytes: int = 0  # sent by TCP, with retransmissions


class Channel:
    """A connection to another vault; ``secret``: None for no authentication. Each direction is for
    one thread at a time; any thread may call :meth:`shutdown`.
    """

    def __init__(
        self, connection: RecordSocket, deadline_seconds: float, secret: bytes | None, realm: str
    ) -> None:
        self._socket = connection
        self._deadline_seconds = deadline_seconds
        self._secret = secret
        self._realm = realm
        self.use: Any = None  # the place in a lane (:mod:`.lanes`) that this connection has
        connection.settimeout(deadline_seconds)

    def authenticate(self) -> None:
        """Authenticate the peer that has connected. Raises WireError or OSError."""
        if self._secret is not None:
            self._socket.settimeout(min(HANDSHAKE_SECONDS, self._deadline_seconds))
            auth.accept(self._socket, self._secret, self._realm)
            self._socket.settimeout(self._deadline_seconds)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a frame. Raises OSError (TimeoutError after the deadline)."""
        framing.send(self._socket, message)

    def receive(self) -> dict[str, Any]:
        """Receive a frame. Raises WireError or OSError."""
        return framing.receive(self._socket)

    def send_bulk(self, view: memoryview) -> None:
        """Send raw bytes without copying them."""
        self._socket.send_bulk(view)

    def receive_bulk(
        self, target: memoryview, on_piece: Callable[[memoryview], object] = lambda piece: None
    ) -> None:
        """Fill ``target`` with raw bytes; ``on_piece`` gets each piece as it arrives."""
        framing.receive_into(self._socket, target, on_piece)

    def readable(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a frame or the end of the stream."""
        if self._socket.pending():
            return True  # already received, so the descriptor does not show it
        try:
            return framing.readable(self._socket.fileno(), seconds)
        except ValueError as error:  # closed by another thread
            raise framing.ConnectionClosed("channel is closed") from error

    def lower_priority(self, dscp: int) -> None:
        """Let bytes of training go before later bytes of this side: see docs/streaming.md."""
        if self._socket.family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
        else:
            self._socket.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)
        # After the traffic class, which sets a priority by itself.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, _BULK)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def sent(self) -> Sent:
        """Return the counters of this side so far."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:  # cut just now
            return Sent()
        busy_microseconds, nbytes = _SENT.unpack_from(info, _SENT_AT)
        return Sent(busy_microseconds / 1e6, nbytes)

    def shutdown(self) -> None:
        """Make every call of both sides fail at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


class Transport:
    """Opens channels to other vaults and accepts theirs: TCP, with the handshake of
    :mod:`deadpool_megatron.wire.auth`. Thread-safe.

    The listening socket is made by the agent and inherited, so the address and the backlog of
    connections survive a restart of the vault. ``silence_seconds``: set where the node has several
    addresses. Connections then leave from that of the listener, and end when the other side has
    acknowledged nothing for this time.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        run_id: str,
        node: int,
        deadline_seconds: float,
        silence_seconds: float = 0.0,
    ) -> None:
        self._listener = listener
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.interface = interface_of(self.address[0])
        self._silence_seconds = silence_seconds
        self._secret = secret
        self._run_id, self._realm = run_id, realm_of(run_id, node)
        self._deadline_seconds = deadline_seconds
        defer_accept(listener, HANDSHAKE_SECONDS)

    def connect(self, node: int, host: str, port: int) -> Channel:
        """Return an authenticated channel to the vault of ``node``. Raises OSError or WireError."""
        realm = realm_of(self._run_id, node)
        limit, origin = self._deadline_seconds, None
        if self._silence_seconds:
            limit, origin = min(limit, self._silence_seconds), (self.address[0], 0)
        connection = auth.connect((host, port), self._secret, realm, limit, origin)
        self._limit_silence(connection)
        return Channel(connection, self._deadline_seconds, self._secret, realm)

    def accept(self, seconds: float) -> Channel | None:
        """Return the next channel, not yet authenticated, or None when none arrived in time. Raises
        OSError, for example when no descriptor is left."""
        self._listener.settimeout(seconds)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            return None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._limit_silence(connection)
        records = RecordSocket.of(connection)
        return Channel(records, self._deadline_seconds, self._secret, self._realm)

    def _limit_silence(self, connection: socket.socket) -> None:
        if self._silence_seconds:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, 1),
                (socket.TCP_KEEPINTVL, 1),
                (socket.TCP_USER_TIMEOUT, round(1000 * self._silence_seconds)),
            ):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def close(self) -> None:
        """Accept no more channels."""
        self._listener.close()


def begin_thread(name: str, target: Callable[[], None]) -> None:
    """Run ``target`` in a daemon thread. If the host can start no thread, the vault ends as at any
    unexpected exception, and its successor continues with the same slots."""
    threading.Thread(target=target, name=name, daemon=True).start()


def ask_part(
    channel: Channel, epoch: int, source: Source, generation: Generation, part: str
) -> tuple[int, int]:
    """Request a part and return its bytes and checksum; the bytes follow on the channel.

    Raises Refused; ConnectionError if the vault has not adopted the epoch yet; the errors of
    :meth:`Channel.receive`.
    """
    about = {"role": source.role, "generation": generation.to_list(), "part": part}
    channel.send({"t": "fetch", "epoch": epoch, **about})
    answer = channel.receive()
    if refused := Refused.in_answer(answer):
        if refused.reason is Refusal.EARLY:
            raise ConnectionError("has not adopted the epoch yet")
        raise refused
    return int(answer["nbytes"]), int(answer["checksum"])


def ask_elsewhere(
    channel: Channel, source: Source, generation: Generation
) -> dict[str, tuple[int, int]]:
    """Return the owner's bytes and checksum of the parts of a generation that a copy lacks because
    peers of the role hold the same bytes. Raises the errors of :meth:`Channel.receive`.
    """
    channel.send({"t": "describe", "role": source.role, "generation": generation.to_list()})
    found = channel.receive()["elsewhere"]
    return {str(name): (int(nbytes), int(checksum)) for name, nbytes, checksum in found}


def receive_part(channel: Channel, segment: Segment, slot: int, name: str, nbytes: int) -> int:
    """Receive a part's bytes directly into its slot and return their checksum."""
    digest = xxhash.xxh3_64()
    channel.receive_bulk(segment.data(slot, name, nbytes), digest.update)
    return digest.intdigest()
