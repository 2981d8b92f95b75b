"""The agent's authenticated connection to the coordinator; survives the coordinator's restart.

Everything but beats is numbered, kept until acknowledged, and sent again after a reconnect, so that
a report is never lost between two connections; the coordinator drops what it has seen. Orders come
the same way in the other direction: beats and the first message of a connection acknowledge them,
and what was had already is dropped here. A coordinator that takes over counts its orders anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from deadpool_megatron.cluster.link.greetings import Greetings, Session
from deadpool_megatron.cluster.link.outbox import Outbox
from deadpool_megatron.cluster.link.pacing import Pace, answer_seconds, contact_seconds
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import WireError, reset

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


class CoordinatorLost(Exception):
    """No connection for longer than this node may go on without one."""


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
        self._session: Session | None = None
        self._reading: asyncio.Task[None] | None = None  # of the session
        self._lost_at = 0.0  # the end of the last session
        self._heard_at = 0.0
        self._number = 0
        self._pace = Pace(settings.beat_interval_seconds)
        self._told: Mapping[str, Any] = {}  # in beats of this session
        self._telling = Pace(_TELLING_SECONDS)
        self._unacknowledged = Outbox(_MOST_REPORTS, _MOST_REPORT_BYTES)
        self._retained: deque[tuple[float, int, bytes]] = deque()
        self._boot = ""
        self._ordered = 0  # newest order had of that coordinator
        self._term = 0
        self._refused = False

    @property
    def connected(self) -> bool:
        """Whether the welcome of the current connection has arrived."""
        return self._session is not None

    @property
    def trouble(self) -> str:
        """Why the newest attempt to connect came to nothing."""
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
        return contact_seconds(self._pace.seconds, self._settings)

    @property
    def beat_is_due(self) -> bool:
        """Whether the time between beats that the coordinator asked for is over; asking starts the
        next one.
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
            limit = answer_seconds(self._settings)
        else:
            limit = self._settings.connect_seconds
        if address is not None:
            self._greetings.begin(address, limit)

    def _is_in_doubt(self) -> bool:
        """Whether what there is may not lead to the newest coordinator any more."""
        in_touch = self._session is not None and not self._is_silent(self.contact_seconds)
        if self._refused or (in_touch and not self._has_moved()):
            return False
        return not self._greetings.tasks or self._greetings.needs_another(self._address())

    def _first_message(self) -> dict[str, Any]:
        return {**self._join(), "term": self._term, "of": self._boot, "o": self._ordered}

    def _end_session(self) -> None:
        """It leads nowhere any more, which is not the end of this node."""
        if self._session is not None:
            reset(self._session.writer)
            self._session = None
        self._reading, self._lost_at = None, time.monotonic()
        self._greetings.hurry()

    def _leave(self, fresh: Session) -> None:
        """Close the connection that a fresh one replaces. To a coordinator that does not know of
        its successor this would look like the death of this node, so it is told.
        """
        if self._session is None:
            return
        if fresh.term > self._session.term:
            self.supersede(f"went over to term {fresh.term}")
        self._session.writer.close()

    def _begin(self, session: Session) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._leave(session)
        self._session, self._told, self._telling = session, {}, Pace(_TELLING_SECONDS)
        self._refused = session.welcome.get("t") == "refused"
        if not self._refused:
            self._heard(session.joined_at, session.term)
        self._unacknowledged.acknowledge(int(session.welcome.get("seen", 0)))
        self._term = max(self._term, session.term)
        asked = float(session.welcome.get("beat_seconds", 0.0))
        self._pace = Pace(max(asked, self._settings.beat_interval_seconds))
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
        self._unacknowledged = Outbox(_MOST_REPORTS, _MOST_REPORT_BYTES)
        for number in sorted(frames):
            self._unacknowledged.add(number, frames[number])

    async def _read(self, session: Session) -> None:
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

    def _is_silent(self, limit_seconds: float) -> bool:
        return time.monotonic() - self._heard_at > limit_seconds

    def _has_moved(self) -> bool:
        address = self._address()
        return self._session is not None and address not in (None, self._session.address)

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
