"""The coordinator's connections: connected agents, their latest reports, the orders sent to them.

A connection has been authenticated (:mod:`~deadpool_megatron.wire.listener`). An agent has opened
it if the first message is ``join``, and a command if it is ``control``. Refused connections are
counted, and the first of them are reported.

Only the end or a failure of the socket, or bytes that are no frame, end a connection. If the code
of the coordinator fails at a message, the message is refused and acknowledged: the agent stays, and
does not repeat the message to a successor.

An order is numbered and kept until the agent acknowledges it, in its beats and when it connects.
On a new connection the order is sent again; the agent drops duplicates. All agents share one
sequence of numbers, so that the same frame can be sent to all. Each coordinator (``boot``) has its
own sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import secrets
import sys
import termios
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from deadpool_megatron.cluster.link.message_limits import RetransmitQueue, acknowledge_seconds
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import ConnectionClosed, WireError, reset
from deadpool_megatron.wire.sealed_records import RecordReader

_REPORTED_REFUSALS = 100
_RECONNECT_SECONDS = 0.5
# After this time spent on sending, other callbacks of the loop get a turn.
_SENDING_SECONDS = 0.01
MAXIMUM_PENDING_BYTES = 256 << 20
# Far above the number of orders in the time after which a silent agent is given up.
_MAX_ORDERS = 10_000
_REASON_CHARACTERS = 300
Message = Mapping[str, Any]


@dataclass
class AgentPeer:
    """One agent's connection. ``boot`` identifies the agent process when it reconnects. ``beats``
    has the newest beat of each local rank, with its incarnation.

    ``sent_epoch``: the epoch of the newest record that was sent to the agent, perhaps by an earlier
    coordinator. ``acknowledged``: the number of the report in the last acknowledgement, and the
    time of that.
    """

    node: int
    boot: str
    writer: asyncio.StreamWriter
    last_seen: float
    beats: dict[int, dict[str, Any]] = field(default_factory=dict)
    vault: dict[str, Any] = field(default_factory=dict)
    sent_epoch: int = 0
    acknowledged: tuple[int, float] = (-1, 0.0)
    welcomed: bool = False
    dropped: bool = False
    pinged: bool = False
    orders: RetransmitQueue = field(
        default_factory=lambda: RetransmitQueue(_MAX_ORDERS, MAXIMUM_PENDING_BYTES)
    )

    def ping(self) -> None:
        """Send a ping to a silent agent, once for each silence. If the kernel of its host
        acknowledges the bytes, the node is not cut off, but its agent does not run. An agent that
        has no welcome yet gets no ping.
        """
        if self.welcomed and not self.pinged and not self.dropped:
            self.pinged = True
            self.send({"t": "ping"})

    def undelivered_bytes(self) -> int:
        """Return the bytes sent that the kernel of the other host has not acknowledged."""
        waiting = self.writer.transport.get_write_buffer_size()
        connection = self.writer.get_extra_info("socket")
        if connection is None or self.writer.is_closing():
            return waiting
        answer = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return waiting + int.from_bytes(answer, sys.byteorder)

    def send(self, message: Message) -> None:
        """Queue a message that need not arrive, or that the next welcome repeats. Abort the
        connection of an agent that no longer reads.
        """
        self.send_frame(framing.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Queue a message that is already encoded, as :meth:`send` does."""
        if self.writer.is_closing():
            return
        self.writer.write(frame)
        if self.writer.transport.get_write_buffer_size() > MAXIMUM_PENDING_BYTES:
            self.writer.transport.abort()


class PeerEvents(Protocol):
    """The part of the coordinator that acts on connections."""

    def agent_joined(self, peer: AgentPeer, message: Message, again: bool) -> None:
        """Take an agent that joined. ``again``: the same agent process has reconnected before the
        loss of its old connection was noticed; ``peer.welcomed`` is then that of the old
        connection.
        """

    def agent_reported(self, peer: AgentPeer, message: Message) -> None:
        """Take a numbered report, once, in order, even of a dropped node. Any exception refuses
        this report.
        """

    def agent_left(self, peer: AgentPeer, cause: str) -> None:
        """Take the end of the connection of a node that was not dropped."""

    def superseded(self, reason: str) -> None:
        """Step down, because another coordinator holds a newer term."""

    async def command(self, message: Message) -> dict[str, Any]:
        """Return the answer to a command of a user."""

    def refused(self, sender: str, reason: str) -> None:
        """Report a connection or message that was refused."""


class Peers:
    """The coordinator's connections, for its loop only. ``term``: the coordinator's term."""

    def __init__(self, settings: Settings, events: PeerEvents, term: int) -> None:
        self.agents: dict[int, AgentPeer] = {}
        self.boot = secrets.token_hex(8)  # distinguishes this coordinator from others for agents
        self.refusals = 0
        self._order_count = 0
        self._to_send: deque[tuple[AgentPeer, Callable[[AgentPeer], None]]] = deque()
        self._is_sending = False
        self.current_agent = ""  # description of the agent whose message is being handled
        self._connect_seconds = settings.connect_seconds
        # Beats that arrive sooner after an acknowledgement are not acknowledged, unless reports
        # have arrived in the meantime.
        self._acknowledge_seconds = acknowledge_seconds(settings)
        # An agent that has only joined may be silent longer by this time: until it knows that it is
        # accepted, it applies the limit for rejoining itself.
        self._join_credit_seconds = settings.rejoin_seconds - settings.node_silence_seconds
        self._events = events
        self._term = term
        # The number of the newest report from each agent process, kept after its connection ends.
        self._newest_reports: dict[tuple[int, str], int] = {}
        # The number of its newest greeting: an older greeting is late, its agent has sent another.
        self._newest_greetings: dict[tuple[int, str], int] = {}

    def send_all(self, message: Message) -> None:
        """Give an order to every agent that has been welcomed and not dropped."""
        self._order(self.active(), message)

    def order(self, node: int, message: Message) -> None:
        """Give an order to an agent, if it is connected."""
        peer = self.agents.get(node)
        if peer is not None and not peer.dropped:
            self._order([peer], message)

    def _order(self, peers: list[AgentPeer], message: Message) -> None:
        self._order_count += 1
        frame = framing.encode({**message, "o": self._order_count})
        for peer in peers:
            peer.orders.add(self._order_count, frame)
        self.send_in_turns([p for p in peers if p.welcomed], lambda peer: peer.send_frame(frame))
        # Only now, as this may lead to further orders, which must be sent after this order.
        for peer in peers:
            if peer.orders.is_over_full and self.agents.get(peer.node) is peer:
                self._give_up(peer, f"it leaves {len(peer.orders)} orders unanswered")

    def _give_up(self, peer: AgentPeer, cause: str) -> None:
        """Report the end of an agent's connection, and close it."""
        del self.agents[peer.node]
        try:
            self._events.agent_left(peer, cause)
        finally:
            self.forget(peer)  # afterwards, as agent_left does nothing for a dropped peer

    def send_in_turns(self, peers: list[AgentPeer], send: Callable[[AgentPeer], None]) -> None:
        """Call ``send`` for each peer. Among thousands of peers other callbacks of the loop get
        their turns; the order of the calls of this method is kept.
        """
        self._to_send.extend((peer, send) for peer in peers)
        if not self._is_sending:
            self._send_some()

    def _send_some(self) -> None:
        until = time.monotonic() + _SENDING_SECONDS
        while self._to_send and time.monotonic() < until:
            peer, send = self._to_send.popleft()
            send(peer)
        self._is_sending = bool(self._to_send)
        if self._is_sending:
            asyncio.get_running_loop().call_soon(self._send_some)

    def welcome(self, peer: AgentPeer, message: Message, record: bytes = b"") -> None:
        """Send an agent its welcome, then ``record``, the frame of a record that it lacks, and then
        every order that it has not acknowledged."""
        peer.welcomed = True
        peer.send({**message, "boot": self.boot})
        if record:
            peer.send_frame(record)
        for _, frame in peer.orders:
            peer.send_frame(frame)

    def active(self) -> list[AgentPeer]:
        """Return the agents that have been welcomed and not dropped."""
        return [peer for peer in self.agents.values() if peer.welcomed and not peer.dropped]

    def newest_report(self, peer: AgentPeer) -> int:
        """Return the number of the newest report from this agent process; 0 before the first."""
        return self._newest_reports.get((peer.node, peer.boot), 0)

    def silent(self, limit_seconds: float, now: float) -> list[AgentPeer]:
        """Return the connected agents that have sent nothing for longer than the limit."""
        return [p for p in self.agents.values() if now - p.last_seen > limit_seconds]

    def reaches_majority(self, limit_seconds: float, now: float, own_node: int | None) -> bool:
        """Return whether at least half of the connected agents have sent something within the
        limit. The agent of ``own_node`` does not count, as it is reached without a network.
        """
        others = [peer for peer in self.agents.values() if peer.node != own_node]
        silent = sum(now - peer.last_seen > limit_seconds for peer in others)
        return 2 * silent <= len(others)

    def reset_timers(self, now: float) -> None:
        """Restart every silence timer, because silence until now proves nothing."""
        for peer in self.agents.values():
            peer.last_seen = max(peer.last_seen, now)

    def forget(self, peer: AgentPeer) -> None:
        """Close an agent's connection without a report about it."""
        peer.dropped = True
        if self.agents.get(peer.node) is peer:
            del self.agents[peer.node]
        peer.writer.close()

    async def serve(self, reader: RecordReader, writer: asyncio.StreamWriter, sender: str) -> None:
        """Serve one authenticated connection until it ends."""
        try:
            async with asyncio.timeout(self._connect_seconds):
                first = await framing.read_frame(reader)
        except ConnectionClosed:
            return  # a probe that only checked whether the handshake works
        except WireError as error:
            self.refuse(sender, f"WireError: {error}")
            return
        except TimeoutError:
            self.refuse(sender, f"no first message within {self._connect_seconds:g} s")
            return
        except OSError:
            return  # reset by the peer
        if first.get("t") == "join":
            await self._serve_agent(reader, writer, first)
        elif first.get("t") == "control":
            await self._serve_command(writer, sender, first)
        else:
            self.refuse(sender, f"unknown first message {str(first.get('t'))[:40]!r}")

    async def _serve_command(
        self, writer: asyncio.StreamWriter, sender: str, message: Message
    ) -> None:
        try:
            answer = await self._events.command(message)
            # The status of a large run is megabytes.
            frame = framing.frame(await asyncio.to_thread(framing.dumps_in_parts, answer))
        except Exception as error:
            self.refuse_broken(sender, f"command {str(message.get('command'))[:40]!r}", error)
            return
        writer.write(frame)
        with contextlib.suppress(OSError, TimeoutError):  # the command has ended
            await asyncio.wait_for(writer.drain(), self._connect_seconds)

    def refuse(self, sender: str, reason: str) -> None:
        """Count a refused connection or message, and report the first of them."""
        self.refusals += 1
        if self.refusals <= _REPORTED_REFUSALS:
            try:
                self._events.refused(sender, reason)
            except Exception as error:  # must not look like the end of a connection
                traceback.print_exception(error)

    def refuse_broken(self, sender: str, subject: str, error: BaseException) -> None:
        """Refuse a message at which our own code failed, and print the traceback."""
        if self.refusals < _REPORTED_REFUSALS:
            traceback.print_exception(error)
        self.refuse(sender, f"{subject}: {error!r}"[:_REASON_CHARACTERS])

    async def _serve_agent(
        self, reader: RecordReader, writer: asyncio.StreamWriter, first: Message
    ) -> None:
        try:
            if int(first["term"]) > self._term:
                self._events.superseded(f"node {first['node']}: has heard of term {first['term']}")
                return
            if self._is_late(first):
                return
            peer, again = self._admit(writer, first)
        except (WireError, LookupError, TypeError, ValueError, OverflowError) as error:
            self.refuse("an agent", f"{type(error).__name__}: {error}")
            return
        cause = "its first message was refused"
        try:
            if self._hand_over(peer, first, partial(self._events.agent_joined, again=again)):
                cause = await self._read_reports(peer, reader)
            else:
                peer.send({"t": "refused", "why": cause})
        finally:
            if self.agents.get(peer.node) is peer:
                del self.agents[peer.node]
                self._events.agent_left(peer, cause)

    def _is_late(self, first: Message) -> bool:
        """Return whether the agent has already sent a newer greeting."""
        process, number = (int(first["node"]), str(first["boot"])), int(first["greeting"])
        newest = self._newest_greetings.get(process, 0)
        self._newest_greetings[process] = max(newest, number)
        return number < newest

    def _admit(self, writer: asyncio.StreamWriter, first: Message) -> tuple[AgentPeer, bool]:
        """Return the peer for an agent's first message, and whether the same agent process has
        another connection. Raises WireError if another agent has its number; KeyError, TypeError,
        ValueError if malformed.
        """
        node, boot = int(first["node"]), str(first["boot"])
        until = time.monotonic() + self._join_credit_seconds
        peer = AgentPeer(node, boot, writer, until)
        old = self.agents.get(node)
        again = old is not None and old.boot == boot and not old.dropped
        if old is not None:
            if old.boot != boot:
                peer.send({"t": "refused", "why": f"node {node} is connected already"})
                raise WireError(f"a second agent calls itself node {node}")
            self.forget(old)
            if again:
                peer.orders, peer.welcomed = old.orders, old.welcomed
        if first.get("of") == self.boot:  # "o" is the number of an order of this coordinator
            peer.orders.acknowledge(int(first["o"]))
        self.agents[node] = peer
        return peer, again

    async def _read_reports(self, peer: AgentPeer, reader: RecordReader) -> str:
        """Take an agent's messages until its connection ends, and return how it ended."""
        frames = framing.FrameBuffer()

        def take(piece: bytes) -> None:
            for message in frames.feed(piece):
                self._hand_over(peer, message, self._take)

        try:
            await reader.pass_to(take)
        except OSError as error:
            # The stream was cut or altered on its way. A live agent sees the reset and reconnects.
            reset(peer.writer)
            await asyncio.sleep(_RECONNECT_SECONDS)
            return f"connection lost: {error.strerror or error}"
        except ConnectionClosed:
            pass  # the connection ended within a record
        except WireError as error:
            self.refuse(f"agent of node {peer.node}", f"agent sent garbage: {error}")
            return f"agent sent garbage: {error}"
        return "connection closed"

    def _hand_over(
        self, peer: AgentPeer, message: Message, take: Callable[[AgentPeer, Message], None]
    ) -> bool:
        """Call ``take`` with a message. Return False, and refuse the message, if that fails."""
        self.current_agent = f"agent of node {peer.node}"
        try:
            take(peer, message)
        except Exception as error:
            self.refuse_broken(self.current_agent, f"message {str(message.get('t'))[:40]!r}", error)
            return False
        finally:
            self.current_agent = ""
        return True

    def _acknowledge(self, peer: AgentPeer, sent_at: float) -> None:
        """Acknowledge a beat and all reports so far, unless a recent acknowledgement does that."""
        newest, (last, at) = self.newest_report(peer), peer.acknowledged
        if newest != last or peer.last_seen - at >= self._acknowledge_seconds:
            peer.acknowledged = (newest, peer.last_seen)
            peer.send({"t": "ack", "n": newest, "beat": sent_at})

    def _take(self, peer: AgentPeer, message: Message) -> None:
        peer.last_seen = time.monotonic()
        peer.pinged = False
        if message.get("t") == "beat":
            if "members" in message:
                peer.beats = {int(rank): beat for rank, beat in message["members"].items()}
                peer.vault = dict(message["vault"])
            peer.orders.acknowledge(int(message["o"]))
            self._acknowledge(peer, float(message["b"]))
            return
        if message.get("t") == "superseded":
            self._events.superseded(f"node {peer.node}: {message['why']}")
            return
        number = int(message["n"])
        if number <= self.newest_report(peer):
            return
        self._newest_reports[peer.node, peer.boot] = number
        self._events.agent_reported(peer, message)
