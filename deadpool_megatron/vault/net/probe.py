"""Links between vaults, measured before the first epoch: who answers, how soon, how many bytes.

Over the connections that copies take later, with the same handshake and the same limits for
strangers. That the shortest of several exchanges bounds a clock's error best is an idea of NTP's
clock filter (RFC 5905).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deadpool_megatron.vault.errors import MALFORMED
from deadpool_megatron.vault.net.transport import Channel, Transport
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import WireError

THREADS = 64
FIRST_BYTES = 256 << 10
PIECE_BYTES = 4 << 20
MOST_BYTES = 256 << 20
MOST_SECONDS = 1.0
_ECHOES = 8

# Node, host and port of a vault.
Peer = tuple[int, str, int]


def answer(channel: Channel, node: int, message: Mapping[str, Any]) -> None:
    """Serve one probe of another vault. Raises WireError for more bytes than a probe has."""
    nbytes = int(message["nbytes"])
    if not 0 <= nbytes <= PIECE_BYTES:
        raise WireError(f"a probe of {nbytes} bytes")
    channel.send({"t": "probed", "node": node, "wall": time.time()})
    if nbytes:
        channel.send_bulk(memoryview(bytes(nbytes)))


def probe(transport: Transport, peers: Sequence[Peer], *, bulk: bool) -> list[dict[str, Any]]:
    """Returns what was found about the link to each peer, as ``preflight.facts.Link`` has it.

    ``bulk``: whether the bytes that a second brings are measured, too.
    """
    if not peers:
        return []
    with ThreadPoolExecutor(max_workers=min(THREADS, len(peers))) as pool:
        return list(pool.map(lambda peer: _probe_one(transport, peer, bulk), peers))


def _probe_one(transport: Transport, peer: Peer, bulk: bool) -> dict[str, Any]:
    node, host, port = peer
    found = {"peer": node, "error": "", "round_trip_seconds": 0.0, "clock_seconds": 0.0}
    rate = None
    try:
        channel = transport.connect(node, host, port)
        try:
            trip, clock = _echo(channel, node)
            found |= {"round_trip_seconds": trip, "clock_seconds": clock}
            if bulk:
                rate = _receive(channel)
        finally:
            channel.close()
    except (OSError, WireError, *MALFORMED) as error:
        found["error"] = _reason_of(error)
    return {**found, "bytes_per_second": rate}


def _echo(channel: Channel, node: int) -> tuple[float, float]:
    """Returns the shortest round trip, and the peer's clock minus ours by that exchange."""
    found = []
    for _ in range(_ECHOES):
        began, wall = time.monotonic(), time.time()
        channel.send({"t": "probe", "nbytes": 0})
        told = channel.receive()
        trip = time.monotonic() - began
        if told.get("node") != node:
            raise WireError(f"node {told.get('node')} answers there")
        found.append((trip, float(told["wall"]) - (wall + trip / 2)))
    return min(found)


def _receive(channel: Channel) -> float:
    """Returns bytes per second, from the first request to the last byte. In pieces that grow, so
    that a very slow link is found out in time as well.
    """
    room, taken, nbytes = memoryview(bytearray(PIECE_BYTES)), 0, FIRST_BYTES
    began = time.monotonic()
    while taken < MOST_BYTES and time.monotonic() - began < MOST_SECONDS:
        channel.send({"t": "probe", "nbytes": nbytes})
        channel.receive()
        channel.receive_bulk(room[:nbytes])
        taken += nbytes
        nbytes = min(2 * nbytes, PIECE_BYTES)
    return taken / max(time.monotonic() - began, 1e-9)


def _reason_of(error: BaseException) -> str:
    """Returns why a connection failed, in a few words."""
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, framing.ConnectionClosed):
        return "connection closed, as by the vault of another node or run"
    return str(getattr(error, "strerror", None) or error)
