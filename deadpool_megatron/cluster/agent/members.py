"""The members of a node, as its agent supervises them: their messages, freezes and ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from deadpool_megatron.cluster.link.protocol import NUMBERS
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.children import ProcessEnd
from deadpool_megatron.cluster.process.fork_server import StartedMember, Starter
from deadpool_megatron.cluster.process.logs import fatal_error, last_output, tail
from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.failures import process_name
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.framing import FrameBuffer, WireError, encode, send_some

_RECEIVE_BYTES = 1 << 16
# The newest message of each of these kinds is repeated to a coordinator that has just started.
STICKY = (
    *("hello", "warm", "registered", "drained", "restored", "done"),
    *("paused", "fault", "raised", "restore-failed", "size-failed", "durable-request"),
)


class FramePipe:
    """Frames over a stream socket, with callbacks in the running loop; no threads, no blocking.

    ``on_message`` gets each frame; ``on_end`` is called once, at the end of the stream or after
    bytes that are not a frame.
    """

    def __init__(
        self,
        connection: socket.socket,
        on_message: Callable[[dict[str, Any]], None],
        on_end: Callable[[str], None],
    ) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._on_message = on_message
        self._on_end = on_end
        self._frames = FrameBuffer()
        self._unsent = bytearray()
        self._open = True
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(connection.fileno(), self._readable)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send or queue a message; drop it after the end of the stream."""
        if not self._open:
            return
        if not self._unsent:
            self._loop.add_writer(self._connection.fileno(), self._writable)
        self._unsent += encode(message)
        self._writable()

    def read_rest(self) -> None:
        """Read the messages that the peer sent before it ended."""
        while self._open and self._readable():
            continue

    def close(self) -> None:
        """Close without calling ``on_end``."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._connection.fileno())
            self._loop.remove_writer(self._connection.fileno())
            self._connection.close()

    def _readable(self) -> bool:
        try:
            piece = self._connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            piece = b""
        if not piece:
            self._end("end of stream")
            return False
        try:
            for message in self._frames.feed(piece):
                self._on_message(message)
        except WireError as error:
            self._end(str(error))
            return False
        return True

    def _writable(self) -> None:
        send_some(self._connection, self._unsent)
        if not self._unsent:
            self._loop.remove_writer(self._connection.fileno())

    def _end(self, reason: str) -> None:
        self.close()
        self._on_end(reason)


class FreezeDetector:
    """The decision whether a process that has stopped beating is frozen.

    Missing beats alone prove nothing on a busy machine or in a long call that holds the
    interpreter: a process that used CPU time, or is ready to run, is alive. A frozen process is
    stopped, or sleeps without having run at all.
    """

    def __init__(self, pid: int, freeze_seconds: float, now: float) -> None:
        self._pid = pid
        self._freeze_seconds = freeze_seconds
        self._ticks = -1
        self._alive_at = now

    def beat(self, now: float) -> None:
        """Record that a beat arrived."""
        self._alive_at = now

    def reset_timers(self, seconds: float, now: float) -> None:
        """Discount ``seconds`` in which the watching process itself did not run."""
        self._alive_at = min(self._alive_at + seconds, now)

    def silent_seconds(self, now: float) -> float:
        """Return the time since the last sign of life."""
        return now - self._alive_at

    def is_frozen(self, now: float) -> bool:
        """Return whether the process is frozen; inspect it only after a third of the limit."""
        if now - self._alive_at < self._freeze_seconds / 3:
            return False
        status = posix.state_and_cpu_ticks(self._pid)
        if status is None or status[0] in "ZX":
            return False  # the process has ended: the pid file descriptor reports that
        state, ticks = status
        if state not in "Tt" and (state in "RD" or ticks != self._ticks):
            self._ticks = ticks
            self._alive_at = now - self._freeze_seconds / 3
            return False
        return now - self._alive_at >= self._freeze_seconds


class MemberObserver(Protocol):
    """The agent, to which a member's messages, freeze and end are passed."""

    def member_reported(self, member: Member, message: dict[str, Any]) -> None:
        """Take a message other than a beat."""

    def member_frozen(self, member: Member, silent_seconds: float) -> None:
        """Kill a member that shows no sign of life. Called once for a member."""

    def member_ended(self, member: Member, ending: ProcessEnd, cause: str, ordered: bool) -> None:
        """Take the end of a reaped process, after all its messages. ``ordered``: this agent killed
        it for the reason ``cause``; otherwise ``cause`` is the last error in its log.
        """


class Member:
    """One member process. ``newest``: its newest message of each kind in STICKY."""

    def __init__(
        self,
        spec: MemberSpec,
        started: StartedMember,
        settings: Settings,
        observer: MemberObserver,
    ) -> None:
        self.local_rank = spec.place.local_rank
        self.incarnation = spec.place.incarnation
        self.log = spec.log
        self.beat: dict[str, Any] = {}
        self.newest: dict[str, dict[str, Any]] = {}
        self.started_at = time.monotonic()
        self.ended = asyncio.Event()  # set when the process is reaped and its end is reported
        self._kill_cause = ""
        self._frozen = False
        self._settings = settings
        self._observer = observer
        self._watch = started.watch
        self.pid = self._watch.pid
        self._pipe = FramePipe(started.connection, self._receive, self._stream_ended)
        self.freeze = FreezeDetector(self.pid, settings.freeze_seconds, self.started_at)
        self._watch.then(self._report_end)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send an order. Forget the request that it answers, so that no coordinator gets the
        request again."""
        request = self.newest.get("durable-request", {})
        if message.get("t") == "durable-done" and message["iteration"] == request.get("iteration"):
            del self.newest["durable-request"]
        self._pipe.send(message)

    def left_cleanly(self, epoch: int) -> bool | None:
        """Return whether the member left the closed epoch cleanly; None while it has not left."""
        report = self.newest.get("drained")
        if report is None or int(report.get("epoch", 0)) < epoch:
            return None
        return bool(report.get("clean"))

    def reports_since(self, closed: int) -> list[dict[str, Any]]:
        """Return the messages that a new coordinator needs: those without an epoch, and those of
        epochs after ``closed``."""
        return [m for m in self.newest.values() if int(m.get("epoch", closed + 1)) > closed]

    def kill(self, cause: str) -> None:
        """Send SIGKILL to its process group, and keep the cause for the report."""
        self._kill_cause = self._kill_cause or cause
        self._watch.kill()

    def check(self, now: float) -> None:
        """Report the process when it is frozen; kill it when its hello is late."""
        if "hello" not in self.newest:
            if now - self.started_at > self._settings.start_seconds:
                self.kill(f"no hello within start_seconds ({self._settings.start_seconds:g} s)")
            return
        if not self._kill_cause and not self._frozen and self.freeze.is_frozen(now):
            self._frozen = True
            self._observer.member_frozen(self, self.freeze.silent_seconds(now))

    def _receive(self, message: dict[str, Any]) -> None:
        kind = str(message.get("t"))
        self.freeze.beat(time.monotonic())
        if kind == "beat":
            self.beat = message
            return
        if kind in STICKY:
            self.newest[kind] = message
        self._observer.member_reported(self, message)

    def _stream_ended(self, reason: str) -> None:
        if reason != "end of stream":
            self.kill(f"sent garbage: {reason}")

    def _report_end(self, ending: ProcessEnd) -> None:
        self._pipe.read_rest()
        self._pipe.close()
        ordered, cause = bool(self._kill_cause), self._kill_cause
        if not ordered:
            text = tail(self.log)
            cause = fatal_error(text) if ending.exit_code is None else last_output(text)
        self._observer.member_ended(self, ending, cause, ordered)
        self.ended.set()


class NodeMembers:
    """The live members of the node by local rank, and the reports about them to the coordinator.
    ``send``: see :meth:`CoordinatorLink.send`.
    """

    def __init__(
        self,
        node: int,
        make_spec: Callable[[int, int, int], MemberSpec],
        starter: Starter,
        settings: Settings,
        observer: MemberObserver,
        send: Callable[..., None],
    ) -> None:
        self._node = node
        self._send = send
        self._make_spec = make_spec
        self._starter = starter
        self._settings = settings
        self._observer = observer
        self._checked_at = time.monotonic()
        self.by_local_rank: dict[int, Member] = {}
        self.incarnations: dict[int, int] = {}

    async def start(self, local_rank: int, incarnation: int, provisional_role: int) -> None:
        """Start a member unless this or a newer incarnation was started before.

        Raises StartError, and OSError when the caller may try again.
        """
        if incarnation <= self.incarnations.get(local_rank, -1):
            return  # an order repeated by a restarted coordinator
        old = self.by_local_rank.get(local_rank)
        if old is not None:
            # A stopped predecessor would write into its successor's slots when it continues.
            raise RuntimeError(f"local rank {local_rank} still has process {old.pid}")
        spec = self._make_spec(local_rank, incarnation, provisional_role)
        started = await self._starter.start(spec)
        self.by_local_rank[local_rank] = Member(spec, started, self._settings, self._observer)
        self.incarnations[local_rank] = incarnation

    def prepare(self, local_rank: int) -> None:
        """Prepare for a replacement with this local rank, if possible; see Starter.prepare."""
        try:
            self._starter.prepare(local_rank)
        except OSError as error:
            print(f"nothing is prepared for local rank {local_rank}: {error}", file=sys.stderr)

    def remove(self, member: Member) -> None:
        """Forget an ended member."""
        if self.by_local_rank.get(member.local_rank) is member:
            del self.by_local_rank[member.local_rank]

    def find(self, message: Mapping[str, Any]) -> Member | None:
        """Return the live member that an order names by local rank and incarnation, if any."""
        member = self.by_local_rank.get(int(message["slot"]))
        is_current = member is not None and member.incarnation == int(message["incarnation"])
        return member if is_current else None

    def send_all(self, message: Mapping[str, Any]) -> None:
        """Send one order to every live member."""
        for member in self.by_local_rank.values():
            member.send(message)

    def beats(self) -> dict[str, dict[str, Any]]:
        """Return the newest beat of each member, by local rank."""
        return {
            str(m.local_rank): {"incarnation": m.incarnation, **m.beat}
            for m in self.by_local_rank.values()
            if m.beat
        }

    def restored(self) -> dict[str, int]:
        """Return the newest epoch that each member has restored, by local rank."""
        return {
            str(m.local_rank): m.newest["restored"]["epoch"]
            for m in self.by_local_rank.values()
            if "restored" in m.newest
        }

    def check(self) -> None:
        """Look for frozen members; the caller repeats this at least once in a beat interval."""
        now = time.monotonic()
        late = now - self._checked_at - self._settings.beat_interval_seconds
        self._checked_at = now
        for member in list(self.by_local_rank.values()):
            if late > self._settings.beat_interval_seconds:
                member.freeze.reset_timers(late, now)
            member.check(now)

    def close(self) -> None:
        """End the processes that were prepared for replacements."""
        self._starter.close()

    # Reports to the coordinator.

    def pass_on(self, member: Member, message: Mapping[str, Any]) -> None:
        """Pass a member's message on to the coordinator, with the local rank and incarnation of the
        member; an event is passed on with the node only."""
        if "event" in message:
            event = {"node": self._node, **message["event"]}
            self._send({**message, "event": event}, retain=event["kind"] in NUMBERS)
            return
        seat = {"slot": member.local_rank, "incarnation": member.incarnation}
        self._send({"t": "member", **seat, "m": message})

    def report_frozen(self, member: Member, silent_seconds: float) -> None:
        """Report that a member has shown no sign of life for ``silent_seconds``."""
        seat = {"slot": member.local_rank, "incarnation": member.incarnation}
        cause = f"{process_name(self._node, member.local_rank, member.incarnation)} is frozen"
        details = {"cause": cause, "silent_seconds": silent_seconds}
        self._send({"t": "member-suspected", **seat, **details})

    def report_lost(
        self, local_rank: int, incarnation: int, details: Mapping[str, Any], cause: str
    ) -> None:
        """Report that a member has ended, or could not be started; ``details``: how it ended."""
        seat = {"slot": local_rank, "incarnation": incarnation}
        self._send({"t": "member-lost", **seat, **details, "last_line": cause})

    def repeat(self, closed_epoch: Callable[[], int], within_seconds: float) -> None:
        """Repeat the members' reports, except for closed epochs, to a new coordinator. They are
        sent at a random moment within the time, as the reports of all agents at once may be too
        many.
        """
        if within_seconds:
            moment = random.uniform(0, within_seconds)
            asyncio.get_running_loop().call_later(moment, self.repeat, closed_epoch, 0.0)
            return
        for member in self.by_local_rank.values():
            for message in member.reports_since(closed_epoch()):
                self.pass_on(member, message)

    def signal_part(self, message: Mapping[str, Any], vault: int | None) -> None:
        """Carry out ``deadpool kill``, by which a user tries out a recovery: signal a part of this
        node. ``vault`` is the vault's process id, None between two vaults."""
        number = signal.Signals[f"SIG{message['signal']}"]
        part = message["part"]
        if part == "role":
            if (member := self.find(message)) is not None:
                posix.kill(member.pid, number)
            return
        pids = [] if part == "agent" or vault is None else [vault]
        if part == "node":
            pids += [member.pid for member in self.by_local_rank.values()]
        if part in ("agent", "node"):  # last, but before it can report the ends of the others
            pids.append(os.getpid())
        for pid in pids:
            posix.kill(pid, number)


async def wait_ended(members: list[Member], deadline_seconds: float) -> bool:
    """Wait until all members have ended. Return False after the deadline, as the kernel may hold a
    process."""
    try:
        async with asyncio.timeout(deadline_seconds):
            for member in members:
                await member.ended.wait()
    except TimeoutError:
        pids = [member.pid for member in members if not member.ended.is_set()]
        print(f"processes {pids} did not end within {deadline_seconds:g} s", file=sys.stderr)
        return False
    return True


async def wait_left(
    members: list[Member], epoch: int, changed: asyncio.Event, settings: Settings
) -> None:
    """Wait until every member has left the epoch; kill and reap the members that are late or fail.

    The caller sets ``changed`` whenever a member has left or ended.
    """
    with contextlib.suppress(TimeoutError):  # late members are killed below, with that cause
        async with asyncio.timeout(settings.close_seconds):
            while any(m.left_cleanly(epoch) is None and not m.ended.is_set() for m in members):
                changed.clear()
                await changed.wait()
    killed = [member for member in members if not member.left_cleanly(epoch)]
    for member in killed:
        late = member.left_cleanly(epoch) is None
        limit = f"did not leave within {settings.close_seconds:g} s"
        member.kill(f"epoch {epoch} {limit if late else 'could not be left cleanly'}")
    await wait_ended(killed, settings.stage_seconds)
