"""Connections of a coordinator without a network: each prints what is sent to it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cluster.link.peers import AgentPeer, Peers
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.framing import FrameBuffer, encode
from deadpool_megatron.wire.sealed_records import RecordReader
from tests.cluster.link.streams import Stream


class Connection(Stream):
    """One connection to ``peers``, from its first message on; ``size``: bytes that wait in it."""

    def __init__(self, events: PeerPrinter, name: str, *messages: Mapping[str, Any]) -> None:
        super().__init__()
        self.name, self.reader, self._frames = name, RecordReader(), FrameBuffer()
        given: Any = self
        self.task = asyncio.create_task(events.peers.serve(self.reader, given, name))
        self.send(*messages)

    def send(self, *messages: Mapping[str, Any]) -> None:
        self.reader.feed_data(b"".join(map(encode, messages)))

    def write(self, data: bytes) -> None:
        for message in self._frames.feed(data):
            print(f"to {self.name}: {message}")

    def get_extra_info(self, name: str) -> Any:
        return None

    def close(self) -> None:
        print(f"{self.name} is closed")
        super().close()

    def abort(self) -> None:
        print(f"{self.name} is reset")
        super().abort()

    async def drain(self) -> None:
        """Nothing waits."""


class PeerPrinter:
    """Prints what the coordinator is told of its connections. ``fails``: it fails at a report of
    this value, or at a join."""

    def __init__(self, settings: Settings) -> None:
        self.fails: Any = None
        self.peers = Peers(settings, self, 1)
        self.peers.boot = "c1"

    def agent_joined(self, peer: AgentPeer, message: Mapping[str, Any], again: bool) -> None:
        if self.fails == "join":
            raise ValueError("it fails at a join")
        print(f"node {peer.node} joined{' again' if again else ''}; {self.peers.current_agent}")
        if message.get("is_in", True):
            self.peers.welcome(peer, {"t": "welcome", "seen": self.peers.newest_report(peer)})

    def agent_reported(self, peer: AgentPeer, message: Mapping[str, Any]) -> None:
        if self.fails == message["value"]:
            raise ValueError(f"it fails at {self.fails}")
        print(f"node {peer.node} reported {message['value']}")

    def agent_left(self, peer: AgentPeer, cause: str) -> None:
        print(f"node {peer.node} left: {cause}{' (dropped)' if peer.dropped else ''}")

    def superseded(self, reason: str) -> None:
        print(f"superseded: {reason}")

    async def command(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"ok": bool(message["command"])}

    def refused(self, sender: str, reason: str) -> None:
        print(f"refused {sender}: {reason}")


async def turn(seconds: float = 0.0) -> None:
    """Let everything happen that follows, and then so much time go by."""
    await asyncio.sleep(seconds)
    for _ in range(20):
        await asyncio.sleep(0)
