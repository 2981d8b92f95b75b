"""One connection of a simulated agent: greeting, records, frames, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

from deadpool_megatron.wire import framing
from deadpool_megatron.wire.auth import Handshake, address_of
from deadpool_megatron.wire.framing import FrameBuffer, encode
from deadpool_megatron.wire.sealed_records import Direction, Unsealer

_LONG_BYTES = 16 << 10
_decode = framing.decode_body
_decode_long = lru_cache(4)(_decode)  # records, the same for all agents


def _decode_once(body: bytes, limit_bytes: int) -> dict[str, Any]:
    return (_decode_long if len(body) > _LONG_BYTES else _decode)(body, limit_bytes)


framing.decode_body = _decode_once


class Agent(Protocol):
    """The owner of a connection."""

    received_bytes: int

    def join(self) -> Mapping[str, Any]:
        """Return the first message."""

    def took(self, wire: Wire, message: dict[str, Any]) -> None:
        """Take a message of the coordinator."""

    def ended(self, wire: Wire) -> None:
        """Note the end of the connection."""


class Wire(asyncio.Protocol):
    """See asyncio.Protocol."""

    def __init__(self, agent: Agent, secret: bytes, run_id: str) -> None:
        self._agent, self._secret, self._run_id = agent, secret, run_id
        self._transport: asyncio.Transport | None = None
        self._handshake: Handshake | None = None
        self._sending: Direction | None = None
        self._opener: Unsealer | None = None
        self._frames = FrameBuffer()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = address_of(transport.get_extra_info("peername"))
        self._handshake = Handshake(self._secret, self._run_id, address)
        transport.write(encode(self._handshake.hello()))

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        self._agent.ended(self)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._agent.received_bytes += len(data)
        for message in self._frames.feed(data if self._opener is None else self._opener.feed(data)):
            if message["t"] == "challenge":
                self._greet(message)
            else:
                self._agent.took(self, message)

    def _greet(self, challenge: dict[str, Any]) -> None:
        assert self._handshake is not None
        self.write(encode(self._handshake.answer(challenge)))
        # The coordinator sends nothing more before this node's message.
        self._sending = self._handshake.direction("connect")
        self._opener = Unsealer(self._handshake.direction("accept"))
        self.write(encode(self._agent.join()))

    def write(self, data: bytes) -> None:
        """Send a frame, unless the connection is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data if self._sending is None else self._sending.seal(data))

    def abort(self) -> None:
        """End it at once, as the loss of its host does."""
        if self._transport is not None:
            self._transport.abort()
