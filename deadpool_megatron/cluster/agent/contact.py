"""Contact with the coordinator: the node's standby, which says what it saw in the journal and is
told whether there is contact; where the coordinator is, by that or by the run directory; and when a
node that may be cut off must stop its members.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.journal.terms import HeartbeatTiming
from deadpool_megatron.cluster.process.children import ChildWatch, ProcessEnd, start_child
from deadpool_megatron.cluster.process.logs import read
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, address_in
from deadpool_megatron.file_systems import TimedRead
from deadpool_megatron.settings import Settings

_RESTART_SECONDS = 1.0
_END_SECONDS = 5.0
_LONGEST_PAUSE_SECONDS = 30.0
_LINE_BYTES = 1 << 16
_MAX_BYTES = 1 << 16
Address = tuple[str, int]


class StandbySupervisor:
    """Keeps one watching standby alive. One that has claimed a term continues as the coordinator,
    and ends with this process at the latest. Used from the agent's loop only.

    ``command``: of a standby, without ``--report-fd``. ``on_look(term, beat, at)``: the journal was
    read, beginning at monotonic time ``at``; ``on_over(kept)``: the run is over, what
    it holds in memory stays or not.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        log: Path,
        on_look: Callable[[int, str, float], None],
        on_over: Callable[[bool], None],
    ) -> None:
        self._command = command
        # Opened once: the run directory may be away when the next standby starts.
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._on_look = on_look
        self._on_over = on_over
        self._watcher: ChildWatch | None = None
        self._coordinators: list[ChildWatch] = []
        self._line: socket.socket | None = None  # orders go, reports come
        self._unread = b""
        self.address: Address | None = None  # of the newest coordinator
        self._contact = False
        self._order: Callable[[int | None], int] | None = None
        self._coordinator: int | None = None
        self._place: int | None = None
        self._was_in_touch = False
        self._closing = False
        self.trouble = ""  # why the newest look at the journal came to nothing
        self._pause = _RESTART_SECONDS

    def begin(self, launcher_fd: int | None, on_launcher_gone: Callable[[], None]) -> None:
        """Start a standby, where there is a launcher as soon as its pipe has a byte; at the end of
        the pipe call ``on_launcher_gone()``."""
        if launcher_fd is None:
            self.start()
            return
        loop = asyncio.get_running_loop()

        def said() -> None:
            if os.read(launcher_fd, 1):
                self.start()
            else:
                loop.remove_reader(launcher_fd)
                on_launcher_gone()

        loop.add_reader(launcher_fd, said)

    def start(self) -> None:
        """Start a standby that watches, now or as soon as that is possible."""
        if self._closing:
            return
        loop, ours = asyncio.get_running_loop(), None
        try:
            ours, theirs = socket.socketpair()
            with theirs:
                self._watcher = self._start(theirs.fileno())
        except OSError as error:
            if ours is not None:
                ours.close()
            print(f"no standby yet: {error}", file=sys.stderr, flush=True)
            loop.call_later(self._pause, self.start)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_SECONDS)
            return
        self._pause = _RESTART_SECONDS
        self._line, self._unread = ours, b""
        ours.setblocking(False)
        loop.add_reader(ours.fileno(), self._readable)
        if self._place is not None:
            self._tell(f"place {self._place}")
        if self._was_in_touch:  # a takeover, also for one that has only just been started
            self._tell("found")
            if not self._contact:
                self._tell("lost")

    def _start(self, line: int) -> ChildWatch:
        command = [*self._command, "--report-fd", "0"]
        return start_child(command, self._ended, log=self._log, stdin=line, dies_with_us=True)

    def place(self, order: Callable[[int | None], int]) -> None:
        """``order(coordinator)``: how many others may claim before it, by the newest record, if a
        coordinator on that node is to be followed."""
        self._order = order
        self._tell_place()

    def _tell_place(self) -> None:
        place = None if self._order is None else self._order(self._coordinator)
        if place is not None and place != self._place:
            self._place = place
            self._tell(f"place {place}")

    def contact(self, there_is: bool) -> None:
        """Tell a standby whether the coordinator answers this agent: it looks more often while
        not."""
        if there_is != self._contact:
            self._contact = there_is
            self._was_in_touch = self._was_in_touch or there_is
            self._tell("found" if there_is else "lost")

    async def close(self, grace_seconds: float) -> None:
        """End the standby; a coordinator gets its time to say good-bye to the other agents."""
        self._closing = True
        if self._watcher is not None:
            await self._watcher.end(_END_SECONDS)
        for coordinator in self._coordinators:
            try:
                await asyncio.wait_for(coordinator.ended.wait(), grace_seconds)
            except TimeoutError:
                await coordinator.end(_END_SECONDS)
        os.close(self._log)

    def _readable(self) -> None:
        assert self._line is not None
        try:
            piece = self._line.recv(_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # it has ended with orders unread
            piece = b""
        if not piece:
            self._disconnect()
            return
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, line: Mapping[str, Any]) -> None:
        self.trouble = str(line.get("trouble", ""))
        if self.trouble:
            return
        if "over" in line:
            self._on_over(bool(line["kept"]))
        elif "claimed" in line:
            assert self._watcher is not None
            self._coordinators.append(self._watcher)
            self._watcher = None
            self._disconnect()
            # The next standby takes its time to start, and the fence does not wait for it.
            self._look(line, int(line["claimed"]), "claimed")
            self.start()
        else:
            self._look(line, int(line["term"]), str(line["beat"]))

    def _look(self, line: Mapping[str, Any], term: int, beat: str) -> None:
        self._coordinator, address = line["node"], line["address"]
        self._tell_place()
        if address is not None:
            self.address = (str(address[0]), int(address[1]))
        self._on_look(term, beat, float(line["at"]))

    def _disconnect(self) -> None:
        assert self._line is not None
        asyncio.get_running_loop().remove_reader(self._line.fileno())
        self._line.close()
        self._line = None

    def _ended(self, ending: ProcessEnd) -> None:
        if self._watcher is not None and self._watcher.ending is not None:
            self._watcher = None
            if self._line is not None:
                self._readable()  # its last words
            if self._line is not None:
                self._disconnect()
            if not self._closing:
                asyncio.get_running_loop().call_later(_RESTART_SECONDS, self.start)

    def _tell(self, line: str) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):  # it has ended; its successor is told at its start
                self._line.send(f"{line}\n".encode())


class CoordinatorAddress:
    """``seen()``: what the standby saw in the journal. Without that the address is read from
    ``coordinator.json``, by a thread, so that no run directory that hangs holds the agent up;
    ``fixed``: where that is not shared. For the agent's loop.
    """

    def __init__(
        self, run: RunDirectory, fixed: Address | None, seen: Callable[[], Address | None]
    ) -> None:
        self._text = TimedRead(partial(read, run.coordinator, 0, _MAX_BYTES))
        self._seen = seen
        self._told = fixed

    def newest(self) -> Address | None:
        """Returns it, None as long as it is not known; does not block."""
        if (seen := self._seen()) is not None:
            return seen
        with contextlib.suppress(TimeoutError):  # the next one finds what is being read
            self._told = address_in(self._text.look(0.0)) or self._told
        return self._told


class Fence:
    """The moment by which a node that may be cut off must stop its members: the agent's half of
    fencing by time. Pure of I/O and clocks; times are monotonic seconds of this host.

    The coordinator gives the roles of a silent node away after ``node_silence_seconds`` (G) since
    it last heard from it, and only if its own sign of life was in the journal all that time. The
    agent ends its members ``fence_seconds`` (F) after it *sent* the newest beat that was
    acknowledged, which is no later than the moment at which the coordinator heard it. With P the
    time between two looks into the journal, D the time to kill the members and r the bound on the
    ratio of two clocks' rates: (F + P + D) r < G. Nothing is assumed about the network, nor that
    two clocks show the same time.

    A coordinator that shows no sign of life gives nothing away, so while the journal can be read
    and the sign stands still, training continues. After such a gap it counts every silence again;
    see :class:`~deadpool_megatron.cluster.journal.terms.HeartbeatTiming`. A coordinator that takes
    over gives every node ``rejoin_seconds`` from its claim; the node allows itself the same share
    of that as F is of G.
    """

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.fence_seconds
        share = settings.fence_seconds / settings.node_silence_seconds
        self._rejoin_limit = settings.rejoin_seconds * share
        self._rhythm = HeartbeatTiming.of(settings)
        self._contact: float | None = None
        self._contact_term = 0
        self._mark: tuple[int, str] | None = None
        self._term_at = 0.0
        self._changed_at = 0.0
        self._looked_at = 0.0

    def heard(self, sent_at: float, term: int) -> None:
        """The coordinator of a term acknowledged a beat (or join) that was sent at ``sent_at``."""
        if term >= self._contact_term:
            newest = self._contact if term == self._contact_term else None
            self._contact_term = term
            self._contact = sent_at if newest is None else max(newest, sent_at)

    def looked(self, term: int, beat: str, at: float) -> None:
        """The journal was read, beginning at ``at``."""
        before, self._looked_at = self._looked_at, at
        if self._mark is None:
            self._term_at = at if self._contact is None else self._contact
        elif term > self._mark[0]:
            # Claimed after the look before, which may be long ago if the journal was out of reach.
            self._term_at = before
        if self._mark != (term, beat):
            self._mark = (term, beat)
            self._changed_at = at
        elif at - self._changed_at >= self._rhythm.stall and self._contact is not None:
            self._contact = max(self._contact, at)

    def silent_seconds(self, now: float) -> float:
        """Return how long nothing has proved that this node still counts; 0 before the first
        contact."""
        if self._contact is None:
            return 0.0
        return now - (self._term_at if self._is_awaited() else self._contact)

    def _is_awaited(self) -> bool:
        """Return whether a coordinator that this node has not met yet has taken over."""
        return self._mark is not None and self._mark[0] > self._contact_term

    def verdict(self, now: float) -> str:
        """Return why the members must be stopped now; empty while they may continue."""
        silent = self.silent_seconds(now)
        if silent <= (self._rejoin_limit if self._is_awaited() else self._limit):
            return ""
        if now - self._looked_at > 2 * self._rhythm.stall:
            return f"cut off: no coordinator and no journal for {silent:.1f} s"
        return f"cut off: the coordinator lives, but was not reached for {silent:.1f} s"
