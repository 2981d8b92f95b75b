"""The files in which a run reports its course: events, ``final.json`` and ``latest.json``.

The coordinator writes them, and no decision depends on their content. Each term has an event file
of its own, so that an old coordinator that wakes up again cannot write into the file of its
successor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.coordinator.progress import ReportedProgress
from deadpool_megatron.cluster.journal.journal import JournalError
from deadpool_megatron.cluster.machine.actions import Finish
from deadpool_megatron.cluster.machine.state import State
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.bad_nodes import (
    BadNode,
    add_bad_node,
    exclusion_reason,
)
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.events import Event, EventLog, Kind, to_line
from deadpool_megatron.failures import FailureKind
from deadpool_megatron.file_systems import HeldName
from deadpool_megatron.observe.notify import Notices, Outlet
from deadpool_megatron.ownership import OwnershipError

_PAUSE_SECONDS = 1.0
# Longest wait at the end of a run for the delivery of notices.
_NOTICE_SECONDS = 5.0
# If this variable is "all", the seals, commits and waits of each role are written, as is needed to
# diagnose a slow commit.
DETAIL_VARIABLE = "DEADPOOL_EVENT_DETAIL"
# Seals, commits and waits at the gate are by far the most frequent reports, and are of little
# interest role by role: one line for all roles is written per period.
PERIOD_SECONDS = 10.0
# How the digest combines the times of several commits.
_COMBINED = {"ship_seconds": max, "window_seconds": min, "commit_seconds": max}
_MAX_BYTES = 64 << 20
_BATCH_BYTES = 1 << 20
_SYNC_SECONDS = 1.0
_RETRY_SECONDS = 0.5
# A write that takes longer than this is reported, like a write that fails.
_LONG_SECONDS = 5.0
# The status has at most this many waiting events: the newest, without events of single processes,
# and only the last of consecutive steps.
_SHOWN_EVENTS = 512
_NOT_SHOWN = (
    *(Kind.LOG, Kind.SEALED, Kind.COMMITTED, Kind.GATE_WAIT, Kind.PHASE, Kind.STATE_HASH),
    *(Kind.STACK, Kind.MEMBER_STARTED, Kind.MEMBER_WARM, Kind.MEMBER_DONE, Kind.VAULT_STARTED),
)
# Kinds of loss that are evidence against the host. (A quarantine is evidence too, see is_bad.) The
# end of a connection is not in the list: it is also the sign of a cancelled job, and the next job
# would exclude all nodes of that job.
_HOST_IS_TO_BLAME = (
    FailureKind.DEVICE_ERROR,
    FailureKind.EXCLUDED,
    FailureKind.NODE_CUT,
    FailureKind.NODE_FROZEN,
    FailureKind.SILENT_CORRUPTION,
)


class RunFiles:
    """Writer of a run's files; ``progress``: the source of the run's result."""

    def __init__(
        self, run: RunDirectory, info: RunInfo, term: int, progress: ReportedProgress
    ) -> None:
        self._run = run
        self._info = info
        self._progress = progress
        commits, waits = CommitDigest(), WaitDigest()
        self._digests: dict[Kind, CommitDigest | WaitDigest] = {}
        if os.environ.get(DETAIL_VARIABLE) != "all":
            self._digests = {Kind.SEALED: commits, Kind.COMMITTED: commits, Kind.GATE_WAIT: waits}
        self.writer = EventWriter(EventLog(run.events, term))
        notify, on_event = info.settings.notify, info.settings.on_event
        self._notices = Notices(info.run_id, notify, on_event, self._warn)
        self._bad_nodes = BadNodes(run, info.run_id, self._warn)
        # Events are dated by the monotonic clock, so that dates never step back within a term.
        self._clock_zero = time.time() - time.monotonic()
        self._stepped_at: float | None = None

    def describe(self) -> dict[str, Any]:
        """Return, for the status: the present date by the clock of events (``now``), the seconds
        since this coordinator has received the newest step, and the waiting events."""
        now = time.monotonic()
        ago = None if self._stepped_at is None else now - self._stepped_at
        times = {"now": self._clock_zero + now, "step_seconds_ago": ago}
        return {**times, "events": self.writer.describe()}

    def write(self, event: Event) -> None:
        """Queue an event with the present date, or add it to a digest of many events."""
        now = time.monotonic()
        event = replace(event, wall_seconds=self._clock_zero + now)
        self._stepped_at = now if event.kind is Kind.STEP else self._stepped_at
        digest = self._digests.get(event.kind)
        self._write_all([event] if digest is None else digest.add(event, now))

    def result(self, end: Finish, state: State) -> dict[str, Any]:
        """Return the object of ``final.json``. It has the newest recoveries of this coordinator's
        time, with the phases that were reported after the event of the recovery.
        """
        head = {"run_id": self._info.run_id, "world_size": self._info.world_size}
        final = self._progress.final(head, end.reason, end.exit_status)
        # Reports of the newest iterations may be lost with a node, while a save has the state.
        saved = 0 if end.resume is None else end.resume.generation.iteration
        return {
            **final,
            "iterations": max(int(final["iterations"]), saved),
            "kind": end.kind,
            "slots_kept": end.keeps_slots,
            "recovery_count": state.recoveries.count,
            "steps_recomputed": state.recoveries.steps_recomputed,
            "recoveries": [report.to_dict() for report in state.recoveries.finished],
        }

    def write_result(self, end: Finish, state: State, result: Mapping[str, Any]) -> None:
        """Write the last files: the state to continue from, if any, then the result. Blocks; raises
        OSError.

        Checkpoints that include the update of a non-finite loss are dropped, since no record
        follows that would warn the next run of them.
        """
        self._run.check_own()
        if end.resume is not None:
            older = state.blame.trusted(run_files.still_valid(self._run.latest, end.resume))
            run_files.write_latest(self._run.latest, [end.resume, *older])
        else:
            with contextlib.suppress(FileNotFoundError, ValueError):
                valid = run_files.read_valid(self._run.latest)
                trusted = state.blame.trusted(valid)
                if not trusted:
                    self._run.latest.unlink()
                elif trusted != valid:
                    run_files.write_latest(self._run.latest, trusted)
        run_files.write_json(self._run.final, result, lasting=True)

    async def show_address(self, values: Mapping[str, Any]) -> None:
        """Write the address to ``coordinator.json``, as soon as that is possible."""
        while True:
            try:
                return await asyncio.to_thread(run_files.write_json, self._run.coordinator, values)
            except OSError:
                await asyncio.sleep(_PAUSE_SECONDS)  # the event writer reports the error

    async def keep_name(self, write_again: Callable[[], None]) -> None:
        """Restore ``run.json``, by which commands find the run, if another program removes it,
        alone or with the whole directory. ``write_again()`` restores the other files that are
        needed to find and continue the run."""

        def make() -> None:
            self._run.create(self._info)
            self._run.check_own()
            write_again()

        name, is_lost = HeldName(self._run.path / run_files.RUN_FILE, make), False
        while True:
            await asyncio.sleep(_PAUSE_SECONDS)
            try:
                if await asyncio.to_thread(name.look):
                    is_lost = True
                elif is_lost:
                    # The removal may have continued, and removed the new files too.
                    await asyncio.to_thread(make)
                    is_lost = False
                    self._warn(
                        f"{self._run.path / run_files.RUN_FILE} was removed under the run, or its"
                        " directory: created again; training continues, what else was there is lost"
                    )
            except (OSError, OwnershipError, JournalError):
                pass  # the directory is removed, or full; the event writer reports the error

    def _write_all(self, events: list[Event]) -> None:
        for event in events:
            self.writer.write(event)
            self._notices.note(event)
            self._bad_nodes.note(event)

    def _warn(self, text: str) -> None:
        """Write a line for people. Any thread may call this."""
        self.writer.write(Event(Kind.LOG, data={"level": "warning", "text": text}))

    def take_digests(self) -> list[Event]:
        """Return the collected digests that are not written yet."""
        digests = dict.fromkeys(self._digests.values())
        return [event for digest in digests for event in digest.take()]

    def close(self, limit_seconds: float) -> None:
        """Write the remaining events, for ``limit_seconds`` at most."""
        self._write_all(self.take_digests())
        until = time.monotonic() + min(limit_seconds, _NOTICE_SECONDS)
        self._bad_nodes.file.flush(until)
        self._notices.flush(until)
        if count := self.writer.close(limit_seconds):
            print(f"{count} events could not be written", file=sys.stderr)


class EventWriter:
    """Writer of events with a thread of its own. Any thread may add events, and no caller waits for
    the run directory, which may hang or be full.

    No decision depends on events, and no coordinator reads the events of another. So neither
    decisions nor the sign of life depend on the duration of a write or an fsync. Events that cannot
    be written yet stay in memory up to a limit, and are written when the file system works again.
    Events above the limit are dropped, and their number is reported in one line.
    """

    def __init__(self, log: EventLog, max_bytes: int = _MAX_BYTES) -> None:
        self._log = log
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._recent = deque[Event](maxlen=_SHOWN_EVENTS)
        self._bytes = 0
        self._in_hand = 0  # the events that are being written
        self._dropped = 0
        self._reported = 0  # the dropped events that were reported
        self._since: float | None = None  # the start of the unfinished write
        self._error = ""  # the error of a failed write
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="events", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Queue an event, or drop it if the queue is full. Does not block."""
        line = to_line(event)
        with self._changed:
            if event.kind not in _NOT_SHOWN:
                if event.kind is Kind.STEP and self._recent and self._recent[-1].kind is Kind.STEP:
                    self._recent.pop()
                self._recent.append(event)
            if self._bytes + len(line) > self._max_bytes:
                self._dropped += 1
                return
            self._append(line)
            self._changed.notify()

    def _append(self, line: bytes) -> None:
        self._lines.append(line)
        self._bytes += len(line)

    def describe(self) -> dict[str, Any]:
        """Return, for the status: the numbers of ``waiting`` and ``dropped`` events, the problem
        (``trouble``), its reason (``why``) and duration (``seconds``). During a problem
        ``unwritten`` has the newest events, some of which may be written by now."""
        with self._changed:
            trouble = self._trouble()
            return {
                "waiting": len(self._lines) + self._in_hand,
                "dropped": self._dropped,
                "trouble": trouble,
                "why": self._error or "it does not answer",
                "seconds": self._write_seconds(),
                "unwritten": [event.to_dict() for event in self._recent] if trouble else [],
            }

    def close(self, limit_seconds: float) -> int:
        """Write the waiting events, for ``limit_seconds`` at most; return how many events could not
        be written. A hanging thread stays until this process ends.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_seconds)
        with self._changed:
            return len(self._lines) + self._in_hand + self._dropped - self._reported

    def _write_seconds(self) -> float:
        """Return the time since the start of the unfinished write."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def _trouble(self) -> str:
        seconds = self._write_seconds()
        if self._error:
            return f"events cannot be written for {seconds:.0f} s: {self._error}"
        is_long = seconds > _LONG_SECONDS
        return f"a write of events has not returned for {seconds:.0f} s" if is_long else ""

    def _work(self) -> None:
        lines, is_synced, synced_at = b"", True, time.monotonic()
        while True:
            lines = lines or self._next_batch(None if is_synced else synced_at + _SYNC_SECONDS)
            if not lines and is_synced:
                break
            try:
                while lines:
                    lines = lines[self._log.append(lines) :]
                    is_synced = False
                if time.monotonic() - synced_at >= _SYNC_SECONDS or self._is_closing:
                    self._log.sync()
                    is_synced, synced_at = True, time.monotonic()
            except OSError as error:
                self._fail(error)
            else:
                self._works_again()
        self._log.close()

    def _next_batch(self, until: float | None) -> bytes:
        """Wait for lines and return them. Return no bytes at the end, or at the time ``until``
        (monotonic seconds)."""
        with self._changed:
            seconds = None if until is None else max(0.0, until - time.monotonic())
            self._changed.wait_for(lambda: self._lines or self._is_closing, seconds)
            batch: list[bytes] = []
            size = 0
            while self._lines and size < _BATCH_BYTES:
                batch.append(self._lines.popleft())
                size += len(batch[-1])
            self._bytes -= size
            self._in_hand = len(batch)
            self._since = self._since or time.monotonic()
            return b"".join(batch)

    def _fail(self, error: OSError) -> None:
        with self._changed:
            self._error = str(error.strerror or error)
            self._changed.wait_for(lambda: self._is_closing, _RETRY_SECONDS)
        if self._is_closing:
            time.sleep(_RETRY_SECONDS)

    def _works_again(self) -> None:
        with self._changed:
            reason, lost = self._error, self._dropped - self._reported
            seconds = self._write_seconds()
            self._in_hand, self._since, self._error, self._reported = 0, None, "", self._dropped
            if not self._lines:
                self._recent.clear()
            if not reason and seconds < _LONG_SECONDS and not lost:
                return
            reason = reason or "the file system did not answer"
            text = f"events could not be written for {seconds:.0f} s: {reason}; {lost} were dropped"
            # Added even if the queue is above the limit.
            self._append(to_line(Event(Kind.LOG, data={"level": "warning", "text": text})))


def is_bad(event: Event) -> bool:
    """Return whether the event is a reason for the next run not to use the node's host."""
    if event.node is None:
        return False
    kind = event.data.get("kind")
    if event.kind is Kind.NODE_QUARANTINED:  # the next run checks memory and program itself
        return kind not in (FailureKind.NO_SHARED_MEMORY, FailureKind.OTHER_PROGRAM)
    return event.kind is Kind.NODE_LOST and kind in _HOST_IS_TO_BLAME


class BadNodes:
    """Writer of the list of quarantined hosts in the directory of the runs, from the events of this
    run. Nothing waits for it, and no decision of this run depends on it.

    ``warn(text)`` writes a line for people, in any thread.
    """

    def __init__(self, run: RunDirectory, run_id: str, warn: Callable[[str], None]) -> None:
        self._run, self._run_id = run, run_id
        self.file = Outlet("bad-nodes.json", self._add, warn)

    def note(self, event: Event) -> None:
        """Note the event's node if the event shows that it is bad. Does not block."""
        if is_bad(event):
            self.file.put({"text": str(event.data.get("cause")), "event": event.to_dict()})

    def _add(self, notice: Mapping[str, Any]) -> None:
        event = notice["event"]
        try:
            # The listing exists until the run ends, even if the node was lost.
            host = run_files.read_json(self._run.node(event["node"]))["hostname"]
            kind, runs = event["data"].get("kind"), self._run.path.parent
            # If the host was excluded because it is in the list, a new entry would keep it there
            # for ever.
            if kind == FailureKind.EXCLUDED and exclusion_reason(
                runs, host, self._run_id, event["wall_seconds"]
            ):
                return
            hosts = [listing["hostname"] for listing in self._run.node_listings().values()]
            values = {"host": host, "run": self._run_id, "evidence": notice["text"]}
            values |= {"kind": kind, "wall_seconds": event["wall_seconds"]}
            bad = BadNode.from_dict({**values, "alone": hosts.count(host) < 2})
            add_bad_node(runs, bad)
        except (OwnershipError, KeyError, ValueError) as error:
            raise OSError(str(error)) from error


class CommitDigest:
    """Digest of COMMITTED events. SEALED events are dropped, as the commit has all they contain."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._began: float | None = None
        self._roles: set[int | None] = set()
        self._counts = {"reports": 0, "released": 0, "bytes": 0}
        self._times: dict[str, float | None] = dict.fromkeys(_COMBINED)
        self._newest = Event(Kind.COMMITTED, wall_seconds=0.0, monotonic_seconds=0.0)

    def add(self, event: Event, now: float) -> list[Event]:
        """Add an event. Return the digest if the period ends now. ``now``: monotonic seconds.
        Raises KeyError, TypeError or ValueError for a damaged event.
        """
        if event.kind is not Kind.COMMITTED:
            return []
        data, newest = event.data, self._newest
        counts = {"reports": 1, "released": bool(data.get("released"))}
        counts["bytes"] = int(data.get("bytes", 0))
        for name, combine in _COMBINED.items():
            times = [float(s) for s in (self._times[name], data.get(name)) if s is not None]
            self._times[name] = combine(times, default=None)
        self._began = now if self._began is None else self._began
        self._counts = {name: count + counts[name] for name, count in self._counts.items()}
        self._roles.add(event.role)
        # The digest has the time of its newest commit, as it may be written much later.
        self._newest = replace(
            newest,
            epoch=max(newest.epoch, event.epoch),
            iteration=max(newest.iteration or 0, event.iteration or 0),
            wall_seconds=max(newest.wall_seconds, event.wall_seconds),
            monotonic_seconds=max(newest.monotonic_seconds, event.monotonic_seconds),
        )
        return self.take() if now - self._began >= PERIOD_SECONDS else []

    def take(self) -> list[Event]:
        """Return the digest of the collected events, if any, and begin the next digest."""
        if self._began is None:
            return []
        data = {"roles": len(self._roles), **self._counts, **self._times}
        event = replace(self._newest, data=data)
        self._begin()
        return [event]


class WaitDigest:
    """Digest of GATE_WAIT events of waits that are over. The event of a continuing wait is written
    at once, but only the first of an iteration within a period, because roles wait in parallel.
    """

    def __init__(self) -> None:
        # (epoch, iteration) -> monotonic time of the first event, and the digest so far.
        self._ended: dict[tuple[int, int | None], tuple[float, Event]] = {}
        self._lasting: dict[tuple[int, int | None], float] = {}

    def add(self, event: Event, now: float) -> list[Event]:
        """Add an event; return the events to write now. ``now``: monotonic seconds. Raises
        KeyError, TypeError or ValueError for a damaged event.
        """
        key, seconds = (event.epoch, event.iteration), float(event.data["seconds"])
        if not event.data.get("over"):
            reported_at = self._lasting.get(key)
            if reported_at is not None and now - reported_at < PERIOD_SECONDS:
                return []
            self._lasting = {key: now}
            return [event]
        began, digest = self._ended.get(key, (now, None))
        longest, roles, total = event, 1, seconds
        if digest is not None:
            longest = event if seconds > digest.data["longest_seconds"] else digest
            roles, total = digest.data["roles"] + 1, digest.data["seconds"] + seconds
            seconds = max(seconds, digest.data["longest_seconds"])
        data = {"seconds": total, "longest_seconds": seconds, "roles": roles, "over": True}
        self._ended[key] = began, replace(longest, data=data)
        return self._take(now - PERIOD_SECONDS)

    def take(self) -> list[Event]:
        """Return the digests of the collected waits, and begin the next digests."""
        return self._take(float("inf"))

    def _take(self, until: float) -> list[Event]:
        old = [key for key, (began, _) in self._ended.items() if began <= until]
        return [self._ended.pop(key)[1] for key in old]
