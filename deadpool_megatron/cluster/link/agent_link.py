"""The agent's authenticated connection to the coordinator; survives the coordinator's restart.

Everything but beats is numbered, kept until acknowledged, and sent again after a reconnect, so that
a report is never lost between two connections; the coordinator drops what it has seen. Orders come
the same way in the other direction: beats and the first message of a connection acknowledge them,
and what was had already is dropped here. A coordinator that takes over counts its orders again.

A greeting without an answer is not closed, for to a coordinator that has taken it this would look
like the death of the node; another one is sent beside it. Greetings are numbered, and a coordinator
takes none that is older than one it has taken. So once one is welcomed, all older ones can go.

Nor is the first one closed that still waits for its handshake: at a listener with a crowd before it
whoever comes again goes to the end of the queue. Others try beside it, one at a time, each for a
short time: the network may have been mended, or the coordinator may be elsewhere by now.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deadpool_megatron.cluster.link import pacing
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.auth import connect_stream
from deadpool_megatron.wire.framing import WireError, reset
from deadpool_megatron.wire.sealed_records import open_stream

Address = tuple[str, int]
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
# What a coordinator had taken and not yet written is told to its successor again, and so are the
# newest numbers in any case: it knows of nothing between the newest record and its own beginning.
_RETAINED_SECONDS = 10.0
_RETAINED_REPORTS = 64
# With more than this unsent a beat would only say how late it is.
_BEAT_BACKLOG_BYTES = 65536
# Of reports kept while the coordinator is away; far above what a run makes in its restart time.
_MOST_REPORTS = 200_000
_MOST_REPORT_BYTES = 1 << 30
# For eyes; a sign of life comes far more often.
_TELLING_SECONDS = 1.0


@dataclass(frozen=True)
class Contact:
    """One authenticated connection whose welcome has arrived. ``joined_at``: when its first message
    was sent.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    address: Address
    joined_at: float
    welcome: Mapping[str, Any]

    @property
    def term(self) -> int:
        """Of the coordinator at the other end; 0 when it refused."""
        return int(self.welcome.get("term", 0))


@dataclass(eq=False)
class _Greeting:
    """``writer``: once the first message is sent, at ``joined_at``. ``alone_until``: then another
    one may be sent beside one that is not so far yet; None: never.
    """

    number: int
    address: Address
    alone_until: float | None = None
    writer: asyncio.StreamWriter | None = None
    joined_at: float = 0.0
    task: asyncio.Task[Contact] = field(init=False)

    def leave(self) -> None:
        """Close the connection, also one whose welcome has arrived."""
        self.task.cancel()
        if self.writer is not None:
            self.writer.close()


class Greetings:
    """Connections up to their welcome. Used from the agent's loop. ``join()`` gives the first
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
        self._patience_seconds = pacing.answer_seconds(settings)
        self.why = "never reached"  # the last one that failed did so
        self.is_urgent = False

    @property
    def tasks(self) -> set[asyncio.Task[Contact]]:
        """Of those under way."""
        return {greeting.task for greeting in self._under_way}

    def needs_another(self, address: Address | None) -> bool:
        """True where the newest one is not answered in time, or has gone to another coordinator
        than the one at ``address``. At most two at a time are on their way to their first message,
        and each that has sent it waits twice as long as the one before: a busy coordinator is not
        helped by a crowd.
        """
        newest = self._under_way[-1]
        has_moved = address not in (None, newest.address)
        if newest.writer is None:
            until = newest.alone_until
            return until is not None and (has_moved or time.monotonic() > until)
        if self.is_urgent or has_moved:
            return True
        return time.monotonic() - newest.joined_at > self._patience_seconds

    def begin(self, address: Address, limit_seconds: float) -> None:
        """Send one more. ``limit_seconds``: for the connection, and for the handshake; the first of
        several keeps its place for longer. The answer to the first message gets its whole time.
        """
        if self._under_way and self._under_way[-1].writer is not None:
            self._patience_seconds *= 2
        self.is_urgent = False
        self._count += 1
        greeting = _Greeting(self._count, address)
        if not self._under_way and limit_seconds < self._settings.connect_seconds:
            greeting.alone_until = time.monotonic() + limit_seconds
            limit_seconds = self._settings.connect_seconds
        greeting.task = asyncio.create_task(self._open(greeting, limit_seconds))
        # It may end when nobody asks it any more.
        greeting.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._under_way.append(greeting)

    def expedite(self) -> None:
        """A connection has ended on which the coordinator may have counted: soon it takes that for
        the death of the node, and whether it has what waits for its answer is not known.
        """
        self.is_urgent = bool(self._under_way) and self._under_way[-1].writer is not None

    def take(self) -> Contact | None:
        """Return the newest connection whose welcome has come, if there is one, and leaves those
        that are of no use beside it. A later one that may have been taken is not among them.
        """
        for greeting in reversed([one for one in self._under_way if one.task.done()]):
            self._under_way.remove(greeting)
            try:
                session = greeting.task.result()
            except (OSError, TimeoutError, WireError) as error:
                self.why = str(error) or type(error).__name__
                if greeting.writer is not None and greeting.number == self._count:
                    self.expedite()
                continue
            later = [one for one in self._under_way if one.number > greeting.number and one.writer]
            self._leave([one for one in self._under_way if one not in later])
            self._under_way, self.is_urgent = later, False
            self._patience_seconds = pacing.answer_seconds(self._settings)
            return session
        return None

    def close(self) -> None:
        """Leave all of them."""
        self._leave(self._under_way)
        self._under_way, self.is_urgent = [], False
        self._patience_seconds = pacing.answer_seconds(self._settings)

    def _leave(self, greetings: list[_Greeting]) -> None:
        for greeting in greetings:
            greeting.leave()

    async def _open(self, greeting: _Greeting, limit_seconds: float) -> Contact:
        # Not wait_for: in Python 3.11 a greeting that was left could go on to its first message.
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
    """No connection for longer than this node may continue without one."""


class CoordinatorLink:
    """One task runs :meth:`run`; ``send`` and ``beat`` may be called from any callback of the loop.

    ``address()`` is asked before each attempt (a new coordinator may be elsewhere); ``join()``
    gives the first message; ``on_message`` gets every order, the welcome first; ``on_heard(at,
    term)`` is told when the newest acknowledged beat (or join) was sent, in monotonic seconds.
    """

    def __init__(
        self,
        address: Callable[[], tuple[str, int] | None],
        secret: bytes,
        run_id: str,
        settings: Settings,
        join: Callable[[], Mapping[str, Any]],
        on_message: Callable[[Mapping[str, Any]], None],
        on_heard: Callable[[float, int], None] = lambda sent_at, term: None,
    ) -> None:
        self._address = address
        self._settings = settings
        self._join = join
        self._on_message = on_message
        self._on_heard = on_heard
        self._greetings = Greetings(secret, run_id, settings, self._first_message)
        self._session: Contact | None = None
        self._reading: asyncio.Task[None] | None = None  # of the session
        self._lost_at = 0.0  # the end of the last session
        self._heard_at = 0.0
        self._number = 0
        self._pace = pacing.RateLimiter(settings.beat_interval_seconds)
        self._told: Mapping[str, Any] = {}  # in beats of this session
        self._telling = pacing.RateLimiter(_TELLING_SECONDS)
        self._unacknowledged = pacing.RetransmitQueue(_MOST_REPORTS, _MOST_REPORT_BYTES)
        self._retained: deque[tuple[float, int, bytes]] = deque()
        self._boot = ""
        self._ordered = 0  # newest order had of that coordinator
        self._term = 0
        self._refused = False

    @property
    def connected(self) -> bool:
        """Return whether the welcome of the current connection has arrived."""
        return self._session is not None

    @property
    def trouble(self) -> str:
        """Return why the newest attempt to connect came to nothing."""
        return self._greetings.why

    def send(self, message: Mapping[str, Any], *, retain: bool = False) -> None:
        """Report something; it arrives once, in order, now or after a reconnect. ``retain``: told
        again to a coordinator that takes over soon after; it must do no harm to hear it twice.
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
        """With an older newest acknowledged beat than this, contact is in doubt."""
        return pacing.contact_seconds(self._pace.seconds, self._settings)

    @property
    def beat_is_due(self) -> bool:
        """Return whether the time between beats that the coordinator asked for is over; asking
        starts the next one.
        """
        return self._pace.is_due(time.monotonic())

    def beat(self, tell: Callable[[], Mapping[str, Any]] = dict) -> None:
        """Send a sign of life, or nothing while there is no connection. ``tell``: what people who
        ask the coordinator are shown of this node; it is sent now and then, when it has changed.
        """
        if self._session is None:
            return
        writer = self._session.writer
        if writer.transport.get_write_buffer_size() < _BEAT_BACKLOG_BYTES:
            message = {"t": "beat", "b": time.monotonic(), "o": self._ordered}
            if self._telling.is_due(time.monotonic()) and (told := tell()) != self._told:
                self._told = told
                message |= told
            writer.write(framing.encode(message))

    async def flush(self, deadline_seconds: float) -> None:
        """Wait until all reports are acknowledged, or the time is over."""
        limit = time.monotonic() + deadline_seconds
        while self._unacknowledged and time.monotonic() < limit:
            # A beat is what the coordinator answers with the number of the last report.
            self.beat()
            await asyncio.sleep(0.05)

    def supersede(self, why: str) -> None:
        """Tell the coordinator to step down: it is to conclude nothing from the end of this
        connection."""
        if self._session is not None:
            self._session.writer.write(framing.encode({"t": "superseded", "why": why}))

    def close(self) -> None:
        """Leave: the coordinator takes it for the end of this node."""
        if self._session is not None:
            self._session.writer.close()
            self._session = None

    async def run(self, patience_seconds: float) -> None:
        """Connect, serve, reconnect with growing pauses; returns only by exception.

        Raises CoordinatorLost when there was no connection for ``patience_seconds``, or when the
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
            if time.monotonic() - self._lost_at > patience_seconds:
                why = self._greetings.why
                raise CoordinatorLost(f"no coordinator for {patience_seconds:g} s: {why}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS)

    async def _stay_in_contact(self) -> None:
        """From a first greeting until neither a session nor a greeting is left.

        A greeting that is not answered, a session that is silent, and one with a coordinator that
        is not the newest get another greeting beside them: a fresh one gets through a mended
        network at once, where an old connection waits for its next retransmission.
        """
        self._greet()
        try:
            while ways := self._ways():
                first = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait(ways, timeout=self._look_seconds, return_when=first)
                if not done and self._is_in_doubt():
                    self._greet()
                try:
                    if (fresh := self._greetings.take()) is not None:
                        self._begin(fresh)
                    elif self._reading is not None and self._reading.done():
                        self._reading.result()
                except (OSError, TimeoutError, WireError):
                    self._end_session()
        finally:
            self._greetings.close()
            if self._reading is not None:
                self._reading.cancel()

    @property
    def _look_seconds(self) -> float:
        if self._greetings.is_urgent:
            return _FIRST_PAUSE_SECONDS
        calm = self._session is not None and not self._greetings.tasks
        return self.contact_seconds if calm else self._settings.fence_seconds / 12

    def _ways(self) -> set[asyncio.Task[Any]]:
        return self._greetings.tasks | ({self._reading} if self._reading is not None else set())

    def _greet(self) -> None:
        address = self._address()
        if self._session is not None:
            limit = self.contact_seconds
        elif self._boot or self._greetings.tasks:
            # The fence has a limit from the first welcome on, and the next one may be elsewhere.
            limit = pacing.answer_seconds(self._settings)
        else:
            limit = self._settings.connect_seconds
        if address is not None:
            self._greetings.begin(address, limit)

    def _is_in_doubt(self) -> bool:
        """Return whether what there is may not lead to the newest coordinator any more."""
        address, session = self._address(), self._session
        is_silent = time.monotonic() - self._heard_at > self.contact_seconds
        in_touch = session is not None and not is_silent and address in (None, session.address)
        if self._refused or in_touch:
            return False
        return not self._greetings.tasks or self._greetings.needs_another(address)

    def _first_message(self) -> dict[str, Any]:
        return {**self._join(), "term": self._term, "of": self._boot, "o": self._ordered}

    def _end_session(self) -> None:
        """It leads nowhere any more, which is not the end of this node."""
        if self._session is not None:
            reset(self._session.writer)
            self._session = None
        self._reading, self._lost_at = None, time.monotonic()
        self._greetings.expedite()

    def _begin(self, session: Contact) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self._session is not None:
            # To a coordinator that does not know of its successor the end of the connection would
            # look like the death of this node.
            if session.term > self._session.term:
                self.supersede(f"went over to term {session.term}")
            self._session.writer.close()
        self._session, self._told, self._telling = session, {}, pacing.RateLimiter(_TELLING_SECONDS)
        self._refused = session.welcome.get("t") == "refused"
        if not self._refused:
            self._heard(session.joined_at, session.term)
        self._unacknowledged.acknowledge(int(session.welcome.get("seen", 0)))
        self._term = max(self._term, session.term)
        asked = float(session.welcome.get("beat_seconds", 0.0))
        self._pace = pacing.RateLimiter(max(asked, self._settings.beat_interval_seconds))
        boot, self._boot = self._boot, str(session.welcome.get("boot", ""))
        if boot != self._boot:
            self._ordered = 0
        if boot and boot != self._boot:
            self._keep_again()
        for _, data in self._unacknowledged:
            session.writer.write(data)
        self._on_message(session.welcome)
        self._reading = asyncio.create_task(self._read(session))
        # It may end in the moment in which another one takes its place; nobody asks it then.
        self._reading.add_done_callback(lambda task: task.cancelled() or task.exception())

    def _keep_again(self) -> None:
        """Put what is retained in front of what is not acknowledged: the first connection to the
        successor may end before it has arrived.
        """
        frames = {number: data for _, number, data in self._retained} | dict(self._unacknowledged)
        self._unacknowledged = pacing.RetransmitQueue(_MOST_REPORTS, _MOST_REPORT_BYTES)
        for number in sorted(frames):
            self._unacknowledged.add(number, frames[number])

    async def _read(self, session: Contact) -> None:
        # A silent coordinator (its host cut off) shows by missing acknowledgements of beats.
        silence = max(4 * self._settings.node_silence_seconds, self._settings.connect_seconds)
        while True:
            # Not wait_for: in Python 3.11 it forgets a cancellation that comes with the last byte,
            # and what is read then would be obeyed beside what the next session says.
            async with asyncio.timeout(silence):
                message = await framing.read_frame(session.reader)
            if message.get("t") == "ack":
                self._unacknowledged.acknowledge(int(message["n"]))
                self._heard(float(message["beat"]), session.term)
            elif message.get("t") == "ping":
                pass  # that it was received is its answer
            elif int(message.get("o", self._ordered + 1)) > self._ordered:
                self._ordered = int(message.get("o", self._ordered))
                self._on_message(message)

    def _heard(self, sent_at: float, term: int) -> None:
        self._heard_at = max(self._heard_at, sent_at)
        self._on_heard(sent_at, term)


async def first_of(*awaitables: Awaitable[Any]) -> None:
    """Wait until one of the awaitables ends, cancel the others, raise what it raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for task in done:
        task.result()
