"""The agent's authenticated connection to the coordinator, which survives coordinator restarts.

Every message except beats is numbered, kept until acknowledged, and sent again after a reconnect,
so that no report is lost between two connections; the coordinator drops duplicates. Orders work the
same way in the other direction: beats and the first message of a connection acknowledge them, and
duplicates are dropped here. A coordinator that takes over numbers its orders from 1.

A *greeting* is a connection before its welcome. A greeting without an answer is not closed: to a
coordinator that has accepted it, this would look like the death of the node. Another greeting is
sent in parallel. Greetings are numbered, and a coordinator rejects a greeting that is older than
the newest it has received. So after a welcome all older greetings can be closed.

The first greeting is not closed during its handshake either, as a new connection would be the last
in the queue of the listener. Further attempts run in parallel, one at a time, each for a short
time: the network may have recovered, or the coordinator may have moved by now.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.cluster.link import message_limits
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.auth import connect_stream
from deadpool_megatron.wire.framing import WireError, reset
from deadpool_megatron.wire.sealed_records import open_stream

Address = tuple[str, int]
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
# A coordinator may fail before it writes a report. So recent reports, and always the newest, are
# repeated to its successor, which knows nothing of the time between the newest record and its
# start.
_RETAINED_SECONDS = 10.0
_RETAINED_REPORTS = 64
# With more unsent bytes than this, a beat would only arrive late.
_BEAT_BACKLOG_BYTES = 65536
# Reports kept while there is no coordinator; far more than a run sends during its restart.
_MAX_REPORTS = 200_000
_MAX_REPORT_BYTES = 1 << 30
# For facts that only users read; beats are far more frequent.
_FACTS_SECONDS = 1.0


@dataclass(frozen=True)
class Contact:
    """One authenticated connection whose welcome has arrived. ``joined_at`` is the time at which
    its first message was sent.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: Address
    joined_at: float
    welcome: Mapping[str, Any]

    @property
    def term(self) -> int:
        """Return the term of the coordinator at the other end; 0 when it refused."""
        return int(self.welcome.get("term", 0))


@dataclass(eq=False)
class _Greeting:
    """One attempt to connect. ``writer`` is set once the first message is sent, at ``joined_at``.
    Until then another greeting may be sent only after ``alone_until``; None: never.
    """

    number: int
    address: Address
    alone_until: float | None = None
    writer: asyncio.StreamWriter | None = None
    joined_at: float = 0.0
    task: asyncio.Task[Contact] = field(init=False)

    def leave(self) -> None:
        """Close the connection, even if its welcome has arrived."""
        self.task.cancel()
        if self.writer is not None:
            self.writer.close()


class Greetings:
    """Connections before their welcome. Used from the agent's loop. ``join()`` returns the first
    message.
    """

    def __init__(
        self, secret: bytes, run_id: str, settings: Settings, join: Callable[[], Mapping[str, Any]]
    ) -> None:
        self._secret = secret
        self._run_id = run_id
        self._settings = settings
        self._join = join
        self._under_way: list[_Greeting] = []  # the oldest first
        self._count = 0
        self._answer_seconds = message_limits.answer_seconds(settings)
        self.trouble = "never reached"  # the error of the last failed greeting
        self.is_urgent = False

    @property
    def tasks(self) -> set[asyncio.Task[Contact]]:
        """Return the tasks of the pending greetings."""
        return {greeting.task for greeting in self._under_way}

    def needs_another(self, address: Address | None) -> bool:
        """Return whether the newest greeting is not answered in time, or went to another address
        than ``address``, the coordinator's. At most two greetings at a time have yet to send their
        first message. A greeting that has sent it waits twice as long as its predecessor, as more
        connections do not help a busy coordinator.
        """
        newest = self._under_way[-1]
        has_moved = address not in (None, newest.address)
        if newest.writer is None:
            until = newest.alone_until
            return until is not None and (has_moved or time.monotonic() > until)
        if self.is_urgent or has_moved:
            return True
        return time.monotonic() - newest.joined_at > self._answer_seconds

    def begin(self, address: Address, limit_seconds: float) -> None:
        """Start another greeting. ``limit_seconds`` applies to the connection and to the handshake;
        the first of parallel greetings has at least ``connect_seconds``. The answer to the first
        message always has that time.
        """
        if self._under_way and self._under_way[-1].writer is not None:
            self._answer_seconds *= 2
        self.is_urgent = False
        self._count += 1
        greeting = _Greeting(self._count, address)
        if not self._under_way and limit_seconds < self._settings.connect_seconds:
            greeting.alone_until = time.monotonic() + limit_seconds
            limit_seconds = self._settings.connect_seconds
        greeting.task = asyncio.create_task(self._open(greeting, limit_seconds))
        # The task may end when its result is no longer awaited.
        greeting.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._under_way.append(greeting)

    def expedite(self) -> None:
        """Send another greeting soon, because a connection that the coordinator may have accepted
        has ended. The coordinator soon takes that for the death of the node, and the greetings
        under way may not reach it before.
        """
        self.is_urgent = bool(self._under_way) and self._under_way[-1].writer is not None

    def take(self) -> Contact | None:
        """Return the newest connection whose welcome has arrived, if any, and close the others;
        only later greetings that the coordinator may have accepted stay open.
        """
        done = [greeting for greeting in self._under_way if greeting.task.done()]
        for greeting in reversed(done):
            self._under_way.remove(greeting)
            try:
                session = greeting.task.result()
            except (OSError, TimeoutError, WireError) as error:
                self.trouble = str(error) or type(error).__name__
                if greeting.writer is not None and greeting.number == self._count:
                    self.expedite()
                continue
            later = [g for g in self._under_way if g.number > greeting.number and g.writer]
            self._leave([g for g in self._under_way if g not in later])
            self._under_way, self.is_urgent = later, False
            self._answer_seconds = message_limits.answer_seconds(self._settings)
            return session
        return None

    def close(self) -> None:
        """Close all greetings."""
        self._leave(self._under_way)
        self._under_way, self.is_urgent = [], False
        self._answer_seconds = message_limits.answer_seconds(self._settings)

    def _leave(self, greetings: list[_Greeting]) -> None:
        for greeting in greetings:
            greeting.leave()

    async def _open(self, greeting: _Greeting, limit_seconds: float) -> Contact:
        # Not wait_for: in Python 3.11 a cancelled greeting could still send its first message.
        async with asyncio.timeout(limit_seconds):
            reader, writer = await open_stream(greeting.address)
        try:
            async with asyncio.timeout(limit_seconds):
                await connect_stream(reader, writer, self._secret, self._run_id)
            greeting.writer, greeting.joined_at = writer, time.monotonic()
            writer.write(framing.encode({**self._join(), "greeting": greeting.number}))
            async with asyncio.timeout(self._settings.connect_seconds):
                welcome = await framing.read_frame(reader)
        except BaseException:
            writer.close()
            raise
        return Contact(reader, writer, greeting.address, greeting.joined_at, welcome)


class CoordinatorLost(Exception):
    """The loss of the coordinator for longer than this node may continue without a connection."""


class CoordinatorLink:
    """The agent's link. One task runs :meth:`run`; any callback may call ``send`` and ``beat``.

    ``address()`` is called before each attempt (a new coordinator may be elsewhere); ``join()``
    returns the first message; ``on_message`` gets every order, the welcome first; ``on_contact(at,
    term)`` gets the time when the newest acknowledged beat or join was sent, in monotonic seconds.
    """

    def __init__(
        self,
        address: Callable[[], tuple[str, int] | None],
        secret: bytes,
        run_id: str,
        settings: Settings,
        join: Callable[[], Mapping[str, Any]],
        on_message: Callable[[Mapping[str, Any]], None],
        on_contact: Callable[[float, int], None] = lambda sent_at, term: None,
    ) -> None:
        self._address = address
        self._settings = settings
        self._join = join
        self._on_message = on_message
        self._on_contact = on_contact
        self._greetings = Greetings(secret, run_id, settings, self._first_message)
        self._session: Contact | None = None
        self._greeted: Address | None = None  # the newest address tried
        self._read_task: asyncio.Task[None] | None = None  # reads from the session
        self._lost_at = 0.0  # the end of the last session
        self._contact_at = 0.0
        self._number = 0
        self._pace = message_limits.RateLimiter(settings.beat_interval_seconds)
        self._sent_facts: Mapping[str, Any] = {}  # the facts sent in beats of this session
        self._facts_pace = message_limits.RateLimiter(_FACTS_SECONDS)
        self._unacknowledged = message_limits.RetransmitQueue(_MAX_REPORTS, _MAX_REPORT_BYTES)
        self._retained: deque[tuple[float, int, bytes]] = deque()
        self._boot = ""
        self._newest_order = 0  # the number of the newest order from that coordinator
        self._term = 0
        self._refused = False

    @property
    def connected(self) -> bool:
        """Return whether the welcome of the current connection has arrived."""
        return self._session is not None

    @property
    def trouble(self) -> str:
        """Return why the newest attempt to connect failed."""
        return self._greetings.trouble

    def send(self, message: Mapping[str, Any], *, retain: bool = False) -> None:
        """Send a report; it arrives once, in order, now or after a reconnect. ``retain``: repeat it
        to a coordinator that takes over soon after; a duplicate must do no harm.
        """
        self._number += 1
        data = framing.encode({**message, "n": self._number})
        self._unacknowledged.add(self._number, data)
        if self._unacknowledged.is_over_full:
            self._unacknowledged.drop_oldest()
        if retain:
            now = time.monotonic()
            self._retained.append((now, self._number, data))
            long_ago = now - _RETAINED_SECONDS
            while len(self._retained) > _RETAINED_REPORTS and self._retained[0][0] < long_ago:
                self._retained.popleft()
        if self._session is not None:
            self._session.writer.write(data)

    @property
    def contact_seconds(self) -> float:
        """Return the age of the newest acknowledged beat above which contact is uncertain."""
        return message_limits.contact_seconds(self._pace.seconds, self._settings)

    @property
    def beat_is_due(self) -> bool:
        """Return whether the period between beats that the coordinator asked for is over; if so,
        the next period begins.
        """
        return self._pace.is_due(time.monotonic())

    def beat(self, facts: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Send a beat, if there is a connection. ``facts()`` returns the facts about this node that
        the coordinator shows to users; they are sent at intervals, if they have changed.
        """
        if self._session is None:
            return
        writer = self._session.writer
        if writer.transport.get_write_buffer_size() < _BEAT_BACKLOG_BYTES:
            message = {"t": "beat", "b": time.monotonic(), "o": self._newest_order}
            if self._facts_pace.is_due(time.monotonic()) and (new := facts()) != self._sent_facts:
                self._sent_facts = new
                message |= new
            writer.write(framing.encode(message))

    async def flush(self, deadline_seconds: float) -> None:
        """Wait until all reports are acknowledged, or the time is over."""
        limit = time.monotonic() + deadline_seconds
        while self._unacknowledged and time.monotonic() < limit:
            # The coordinator answers a beat with the number of the last report.
            self.beat()
            await asyncio.sleep(0.05)

    def supersede(self, reason: str) -> None:
        """Ask the coordinator to step down, so that it does not take the end of this connection for
        the loss of the node."""
        if self._session is not None:
            self._session.writer.write(framing.encode({"t": "superseded", "why": reason}))

    def close(self) -> None:
        """Close the connection; the coordinator takes this for the loss of the node."""
        if self._session is not None:
            self._session.writer.close()
            self._session = None

    async def run(self, limit_seconds: float) -> None:
        """Connect, serve, reconnect with growing pauses; end only by an exception.

        Raises CoordinatorLost when there is no connection for ``limit_seconds``, or when the
        coordinator refuses this node.
        """
        pause, self._lost_at = _FIRST_PAUSE_SECONDS, time.monotonic()
        while True:
            before = self._lost_at
            await self._stay_in_contact()
            if self._refused:
                raise CoordinatorLost("this node is refused")
            if self._lost_at > before:
                pause = _FIRST_PAUSE_SECONDS
            if time.monotonic() - self._lost_at > limit_seconds:
                raise CoordinatorLost(f"no coordinator for {limit_seconds:g} s: {self.trouble}")
            await self._pause(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    async def _pause(self, seconds: float) -> None:
        """Wait before the next attempt, but no longer once a coordinator has taken over."""
        until, tried = time.monotonic() + seconds, self._greeted
        while (left := until - time.monotonic()) > 0:
            if tried is not None and self._address() not in (None, tried):
                return
            await asyncio.sleep(min(left, _FIRST_PAUSE_SECONDS))

    async def _stay_in_contact(self) -> None:
        """Greet and serve until neither a session nor a greeting is left.

        If a greeting is not answered, or the session is silent or with a coordinator that is not
        the newest, another greeting is sent in parallel. A new connection gets through a recovered
        network at once, where an old connection waits for its next retransmission.
        """
        self._greet()
        try:
            while tasks := self._tasks():
                first = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait(tasks, timeout=self._look_seconds, return_when=first)
                if not done and self._is_uncertain():
                    self._greet()
                try:
                    if (fresh := self._greetings.take()) is not None:
                        self._begin(fresh)
                    elif self._read_task is not None and self._read_task.done():
                        self._read_task.result()
                except (OSError, TimeoutError, WireError):
                    self._end_session()
        finally:
            self._greetings.close()
            if self._read_task is not None:
                self._read_task.cancel()

    @property
    def _look_seconds(self) -> float:
        if self._greetings.is_urgent:
            return _FIRST_PAUSE_SECONDS
        is_settled = self._session is not None and not self._greetings.tasks
        return self.contact_seconds if is_settled else self._settings.fence_seconds / 12

    def _tasks(self) -> set[asyncio.Task[Any]]:
        return self._greetings.tasks | ({self._read_task} if self._read_task is not None else set())

    def _greet(self) -> None:
        self._greeted = address = self._address()
        if self._session is not None:
            limit = self.contact_seconds
        elif self._boot or self._greetings.tasks:
            # After the first welcome the fence leaves little time, and a new coordinator may have
            # another address.
            limit = message_limits.answer_seconds(self._settings)
        else:
            limit = self._settings.connect_seconds
        if address is not None:
            self._greetings.begin(address, limit)

    def _is_uncertain(self) -> bool:
        """Return whether another greeting is needed to reach the newest coordinator."""
        address, session = self._address(), self._session
        is_silent = time.monotonic() - self._contact_at > self.contact_seconds
        in_touch = session is not None and not is_silent and address in (None, session.address)
        if self._refused or in_touch:
            return False
        return not self._greetings.tasks or self._greetings.needs_another(address)

    def _first_message(self) -> dict[str, Any]:
        return {**self._join(), "term": self._term, "of": self._boot, "o": self._newest_order}

    def _end_session(self) -> None:
        """Reset a session that has failed; to the coordinator this is not the loss of the node."""
        if self._session is not None:
            reset(self._session.writer)
            self._session = None
        self._read_task, self._lost_at = None, time.monotonic()
        self._greetings.expedite()

    def _begin(self, session: Contact) -> None:
        if self._read_task is not None:
            self._read_task.cancel()
            self._read_task = None
        if self._session is not None:
            # To a coordinator that does not know of its successor the end of the connection would
            # look like the death of this node.
            if session.term > self._session.term:
                self.supersede(f"went over to term {session.term}")
            self._session.writer.close()
        self._session, self._sent_facts, self._facts_pace = (
            session,
            {},
            message_limits.RateLimiter(_FACTS_SECONDS),
        )
        self._refused = session.welcome.get("t") == "refused"
        if not self._refused:
            self._record_contact(session.joined_at, session.term)
        self._unacknowledged.acknowledge(int(session.welcome.get("seen", 0)))
        self._term = max(self._term, session.term)
        beat = float(session.welcome.get("beat_seconds", 0.0))
        self._pace = message_limits.RateLimiter(max(beat, self._settings.beat_interval_seconds))
        boot, self._boot = self._boot, str(session.welcome.get("boot", ""))
        if boot != self._boot:
            self._newest_order = 0
        if boot and boot != self._boot:
            self._requeue_retained()
        for _, data in self._unacknowledged:
            session.writer.write(data)
        self._on_message(session.welcome)
        self._read_task = asyncio.create_task(self._read(session))
        # The task may end just when a new task replaces it; then its result is not awaited.
        self._read_task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _requeue_retained(self) -> None:
        """Queue retained and unacknowledged reports in order of their numbers. They stay queued
        until acknowledged, as the first connection to the successor may end before they arrive.
        """
        frames = {number: data for _, number, data in self._retained} | dict(self._unacknowledged)
        self._unacknowledged = message_limits.RetransmitQueue(_MAX_REPORTS, _MAX_REPORT_BYTES)
        for number in sorted(frames):
            self._unacknowledged.add(number, frames[number])

    async def _read(self, session: Contact) -> None:
        # A long limit, as missing acknowledgements of beats show the silence of a coordinator
        # earlier.
        silence = max(4 * self._settings.node_silence_seconds, self._settings.connect_seconds)
        while True:
            # Not wait_for: in Python 3.11 it loses a cancellation that comes with the last byte.
            # This session would then carry out orders together with the next session.
            async with asyncio.timeout(silence):
                message = await framing.read_frame(session.reader)
            if message.get("t") == "ack":
                self._unacknowledged.acknowledge(int(message["n"]))
                self._record_contact(float(message["beat"]), session.term)
            elif message.get("t") == "ping":
                pass  # the acknowledgement by TCP is the answer to the ping
            elif int(message.get("o", self._newest_order + 1)) > self._newest_order:
                self._newest_order = int(message.get("o", self._newest_order))
                self._on_message(message)

    def _record_contact(self, sent_at: float, term: int) -> None:
        self._contact_at = max(self._contact_at, sent_at)
        self._on_contact(sent_at, term)


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait for the first of the awaitables to end, cancel the others, and raise its exception."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
