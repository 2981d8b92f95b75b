"""The files in which a run tells what happened: events, ``final.json`` and ``latest.json``.

Belongs to the coordinator, which writes them and decides nothing from what is in them. Each term
has an event file of its own: an old coordinator that wakes up once more cannot write into that of
the new one.
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
from deadpool_megatron.cluster.run_directory.bad_nodes import BadNode, add_bad_node, why_left_out
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.events import Event, EventLog, Kind, to_line
from deadpool_megatron.failures import FailureKind
from deadpool_megatron.file_systems import HeldName
from deadpool_megatron.observe.notify import Notices, Outlet
from deadpool_megatron.ownership import OwnershipError

_PAUSE_SECONDS = 1.0
# So long the end of a run waits for whoever is to be told of it.
_NOTICE_SECONDS = 5.0
# For who looks for the cause of a slow commit: "all" has each role's seals, commits and waits
# written.
DETAIL_VARIABLE = "DEADPOOL_EVENT_DETAIL"
# Seals, commits and waits at the gate are by far the most that a run reports, and nobody reads them
# role by role: they are told in a line for all roles now and then.
PERIOD_SECONDS = 10.0
# Of the times of a commit the one that is told.
_TOLD = {"ship_seconds": max, "window_seconds": min, "commit_seconds": max}
_MAX_BYTES = 64 << 20
_BATCH_BYTES = 1 << 20
_SYNC_SECONDS = 1.0
_RETRY_SECONDS = 0.5
# A write that takes longer is told of, like one that fails.
_LONG_SECONDS = 5.0
# Of events that wait the status has so many newest ones, without those of single processes; of
# steps in a row the last one.
_SHOWN_EVENTS = 512
_OF_ONE = (
    *(Kind.LOG, Kind.SEALED, Kind.COMMITTED, Kind.GATE_WAIT, Kind.PHASE, Kind.STATE_HASH),
    *(Kind.STACK, Kind.MEMBER_STARTED, Kind.MEMBER_WARM, Kind.MEMBER_DONE, Kind.VAULT_STARTED),
)
# Losses that say something about the host; a node that was quarantined, as a slow one, does, too,
# but for lack of memory: the next run looks how much there is then. A
# connection that ends does not: that is also what a cancelled job looks like, and then every node
# of it would be left out of the next one.
_HOST_IS_TO_BLAME = (
    FailureKind.DEVICE_ERROR,
    FailureKind.EXCLUDED,
    FailureKind.NODE_CUT,
    FailureKind.NODE_FROZEN,
    FailureKind.SILENT_CORRUPTION,
)


class RunFiles:
    """``progress``: what the result of the run is made of."""

    def __init__(
        self, run: RunDirectory, info: RunInfo, term: int, progress: ReportedProgress
    ) -> None:
        self._run = run
        self._info = info
        self._progress = progress
        self._is_brief = os.environ.get(DETAIL_VARIABLE) != "all"
        self._commits, self._waits = CommitDigest(), WaitDigest()
        self.writer = EventWriter(EventLog(run.events, term))
        notify, on_event = info.settings.notify, info.settings.on_event
        self._notices = Notices(info.run_id, notify, on_event, self._warn)
        self._bad_nodes = BadNodes(run, info.run_id, self._warn)
        # Dates that never step back within a term: durations between events are those of one clock.
        self._clock_zero = time.time() - time.monotonic()
        self._stepped_at: float | None = None

    def describe(self) -> dict[str, Any]:
        """For the status: ``now`` by the clock of the dates of events, the seconds since the newest
        step that this coordinator has received, and the events that wait."""
        now = time.monotonic()
        ago = None if self._stepped_at is None else now - self._stepped_at
        known = {"now": self._clock_zero + now, "step_seconds_ago": ago}
        return {**known, "events": self.writer.describe()}

    def write(self, event: Event) -> None:
        """Have an event written with the date of now, or a digest of many in its place."""
        now = time.monotonic()
        event = replace(event, wall_seconds=self._clock_zero + now)
        self._stepped_at = now if event.kind is Kind.STEP else self._stepped_at
        if self._is_brief and event.kind in (Kind.SEALED, Kind.COMMITTED):
            digest = self._commits.add(event, time.monotonic())
            self._write_all([] if digest is None else [digest])
        elif self._is_brief and event.kind is Kind.GATE_WAIT:
            self._write_all(self._waits.add(event, time.monotonic()))
        else:
            self._write_all([event])

    def result(self, end: Finish, state: State) -> dict[str, Any]:
        """The object of ``final.json``. The newest recoveries that this coordinator saw are in it,
        with phases reported after their event was written.
        """
        head = {"run_id": self._info.run_id, "world_size": self._info.world_size}
        final = self._progress.final(head, end.reason, end.exit_status)
        # What it told of its newest iterations may be lost with a node, not that they are saved.
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
        """Write the last files: where to continue, if that is anywhere, then the result. Blocks;
        raises OSError.

        A checkpoint with the update of a loss that was not finite is not named any more: no record
        follows that would say so to the next run.
        """
        self._run.check_own()
        if end.resume is not None:
            left = state.blame.trusted(run_files.still_valid(self._run.latest, end.resume))
            run_files.point_at(self._run.latest, [end.resume, *left])
        else:
            with contextlib.suppress(FileNotFoundError, ValueError):
                known = run_files.read_valid(self._run.latest)
                trusted = state.blame.trusted(known)
                if not trusted:
                    self._run.latest.unlink()
                elif trusted != known:
                    run_files.point_at(self._run.latest, trusted)
        run_files.write_json(self._run.final, result, lasting=True)

    async def show_address(self, values: Mapping[str, Any]) -> None:
        """Write ``coordinator.json``, as soon as that is possible."""
        while True:
            try:
                return await asyncio.to_thread(run_files.write_json, self._run.coordinator, values)
            except OSError:
                await asyncio.sleep(_PAUSE_SECONDS)  # the event writer tells what is wrong

    async def keep_name(self, write_again: Callable[[], None]) -> None:
        """Whoever asks for the run looks for its ``run.json``: written again where somebody else
        has removed it, be it with the whole directory; ``write_again()`` writes what else the run
        is found and continued by."""

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
                    # The removal may not have been over, and have taken what was made again.
                    await asyncio.to_thread(make)
                    is_lost = False
                    self._warn(
                        f"{self._run.path / run_files.RUN_FILE} was removed under the run, or its"
                        " directory: created again; training continues, what else was there is lost"
                    )
            except (OSError, OwnershipError, JournalError):
                pass  # away with its directory, or full; the event writer tells what is wrong

    def _write_all(self, events: list[Event]) -> None:
        for event in events:
            self.writer.write(event)
            self._notices.note(event)
            self._bad_nodes.note(event)

    def _warn(self, text: str) -> None:
        """A line for people; in any thread."""
        self.writer.write(Event(Kind.LOG, data={"level": "warning", "text": text}))

    def take_digests(self) -> list[Event]:
        """Return what was collected and not written yet."""
        digest = self._commits.take()
        return [*([] if digest is None else [digest]), *self._waits.take()]

    def close(self, limit_seconds: float) -> None:
        """Write what is left of the events, for so long at most."""
        self._write_all(self.take_digests())
        until = time.monotonic() + min(limit_seconds, _NOTICE_SECONDS)
        self._bad_nodes.file.flush(until)
        self._notices.flush(until)
        if left := self.writer.close(limit_seconds):
            print(f"{left} events could not be written", file=sys.stderr)


class EventWriter:
    """Writes events in a thread of its own, takes them in any: the run directory may hang, or be
    full, and nobody waits.

    Nothing is decided from them, and no coordinator reads what another one wrote; so neither
    decisions nor the sign of life depend on how long a write or an fsync takes. What cannot be
    written yet is kept in memory up to a limit, and written when the file system works again; what
    came above the limit is counted, and told in one line then.
    """

    def __init__(self, log: EventLog, max_bytes: int = _MAX_BYTES) -> None:
        self._log = log
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._recent = deque[Event](maxlen=_SHOWN_EVENTS)
        self._bytes = 0
        self._in_hand = 0
        self._dropped = 0
        self._told = 0  # of those that were dropped
        self._since: float | None = None  # the begin of the write that is yet to be done
        self._why = ""  # it has failed
        self._is_closing = False
        self._thread = threading.Thread(target=self._work, name="events", daemon=True)
        self._thread.start()

    def write(self, event: Event) -> None:
        """Have an event written, or drop it when too much waits already. Does not block."""
        line = to_line(event)
        with self._changed:
            if event.kind not in _OF_ONE:
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
        """For the status: ``waiting`` and ``dropped`` events, what is wrong (``trouble``), ``why``
        and for how many ``seconds``; and then ``unwritten``, the newest that tell the story, of
        which some may be written by now."""
        with self._changed:
            now = time.monotonic()
            trouble = self._trouble(now)
            return {
                "waiting": len(self._lines) + self._in_hand,
                "dropped": self._dropped,
                "trouble": trouble,
                "why": self._why or "it does not answer",
                "seconds": 0.0 if self._since is None else now - self._since,
                "unwritten": [one.to_dict() for one in self._recent] if trouble else [],
            }

    def close(self, limit_seconds: float) -> int:
        """Write the rest, for so long at most; returns how many events could not be written. A
        thread that hangs is left to the end of this process.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(limit_seconds)
        with self._changed:
            return len(self._lines) + self._in_hand + self._dropped - self._told

    def _trouble(self, now: float) -> str:
        seconds = 0.0 if self._since is None else now - self._since
        if self._why:
            return f"events cannot be written for {seconds:.0f} s: {self._why}"
        is_long = seconds > _LONG_SECONDS
        return f"a write of events has not returned for {seconds:.0f} s" if is_long else ""

    def _work(self) -> None:
        rest, is_synced, synced_at = b"", True, time.monotonic()
        while True:
            rest = rest or self._next_batch(None if is_synced else synced_at + _SYNC_SECONDS)
            if not rest and is_synced:
                break
            try:
                while rest:
                    rest = rest[self._log.append(rest) :]
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
        """The next lines, as soon as there are some; nothing at the end, or at the time ``until``
        (monotonic seconds)."""
        with self._changed:
            left = None if until is None else max(0.0, until - time.monotonic())
            self._changed.wait_for(lambda: self._lines or self._is_closing, left)
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
            self._why = str(error.strerror or error)
            self._changed.wait_for(lambda: self._is_closing, _RETRY_SECONDS)
        if self._is_closing:
            time.sleep(_RETRY_SECONDS)

    def _works_again(self) -> None:
        with self._changed:
            why, lost = self._why, self._dropped - self._told
            seconds = 0.0 if self._since is None else time.monotonic() - self._since
            self._in_hand, self._since, self._why, self._told = 0, None, "", self._dropped
            if not self._lines:
                self._recent.clear()
            if not why and seconds < _LONG_SECONDS and not lost:
                return
            why = why or "the file system did not answer"
            text = f"events could not be written for {seconds:.0f} s: {why}; {lost} were dropped"
            # Above the limit, if need be.
            self._append(to_line(Event(Kind.LOG, data={"level": "warning", "text": text})))


def is_bad(event: Event) -> bool:
    """Return whether the event says that its node should not be used by the next run."""
    if event.node is None:
        return False
    kind = event.data.get("kind")
    if event.kind is Kind.NODE_QUARANTINED:
        return kind not in (FailureKind.NO_SHARED_MEMORY, FailureKind.OTHER_PROGRAM)
    return event.kind is Kind.NODE_LOST and kind in _HOST_IS_TO_BLAME


class BadNodes:
    """Notes which hosts this run has put aside, beside the runs. Like notices: nothing waits for
    it, and no decision of this run looks at it.

    Takes the events of a run. ``warn`` takes a line for people, in any thread.
    """

    def __init__(self, run: RunDirectory, run_id: str, warn: Callable[[str], None]) -> None:
        self._run, self._run_id = run, run_id
        self.file = Outlet("bad-nodes.json", self._add, warn)

    def note(self, event: Event) -> None:
        """Keep its node if the event says that it is bad. Does not block."""
        if is_bad(event):
            self.file.put({"text": str(event.data.get("cause")), "event": event.to_dict()})

    def _add(self, notice: Mapping[str, Any]) -> None:
        event = notice["event"]
        try:
            # It is there from the node's start to its run's end, however the node was lost.
            host = run_files.read_json(self._run.node(event["node"]))["hostname"]
            kind, runs = event["data"].get("kind"), self._run.path.parent
            # Left out for what stands there: noted again, that would never be too old.
            if kind == FailureKind.EXCLUDED and why_left_out(
                runs, host, self._run_id, event["wall_seconds"]
            ):
                return
            there = [one["hostname"] for one in self._run.node_listings().values()]
            values = {"host": host, "run": self._run_id, "evidence": notice["text"]}
            values |= {"kind": kind, "wall_seconds": event["wall_seconds"]}
            bad = BadNode.from_dict({**values, "alone": there.count(host) < 2})
            add_bad_node(runs, bad)
        except (OwnershipError, KeyError, ValueError) as error:
            raise OSError(str(error)) from error


class CommitDigest:
    """Collects SEALED and COMMITTED events; a seal tells nothing that its commit does not."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._began: float | None = None
        self._roles: set[int | None] = set()
        self._counts = {"reports": 0, "released": 0, "bytes": 0}
        self._times: dict[str, float | None] = dict.fromkeys(_TOLD)
        self._newest = Event(Kind.COMMITTED, wall_seconds=0.0, monotonic_seconds=0.0)

    def add(self, event: Event, now: float) -> Event | None:
        """Take one in; the line of the time that is over with it, if one is. ``now``: monotonic
        seconds. Raises KeyError, TypeError or ValueError for an event that is damaged.
        """
        if event.kind is not Kind.COMMITTED:
            return None
        data, known = event.data, self._newest
        counts = {"reports": 1, "released": bool(data.get("released"))}
        counts["bytes"] = int(data.get("bytes", 0))
        for name, told in _TOLD.items():
            times = [float(s) for s in (self._times[name], data.get(name)) if s is not None]
            self._times[name] = told(times, default=None)
        self._began = now if self._began is None else self._began
        self._counts = {name: count + counts[name] for name, count in self._counts.items()}
        self._roles.add(event.role)
        # The time of the newest commit, not of the line: it may be said much later.
        self._newest = replace(
            known,
            epoch=max(known.epoch, event.epoch),
            iteration=max(known.iteration or 0, event.iteration or 0),
            wall_seconds=max(known.wall_seconds, event.wall_seconds),
            monotonic_seconds=max(known.monotonic_seconds, event.monotonic_seconds),
        )
        return self.take() if now - self._began >= PERIOD_SECONDS else None

    def take(self) -> Event | None:
        """The line of what was collected, if there is anything; the next one begins again."""
        if self._began is None:
            return None
        data = {"roles": len(self._roles), **self._counts, **self._times}
        event = replace(self._newest, data=data)
        self._begin()
        return event


class WaitDigest:
    """Collects GATE_WAIT events. A wait that lasts is told at once, of each iteration the first in
    a while: roles wait side by side.
    """

    def __init__(self) -> None:
        # By epoch and iteration: since when, monotonic seconds.
        self._ended: dict[tuple[int, int | None], tuple[float, Event]] = {}
        self._lasting: dict[tuple[int, int | None], float] = {}

    def add(self, event: Event, now: float) -> list[Event]:
        """Take one in; returns what is to be written now. ``now``: monotonic seconds. Raises
        KeyError, TypeError or ValueError for an event that is damaged.
        """
        key, seconds = (event.epoch, event.iteration), float(event.data["seconds"])
        if not event.data.get("over"):
            told = self._lasting.get(key)
            if told is not None and now - told < PERIOD_SECONDS:
                return []
            self._lasting = {key: now}
            return [event]
        began, known = self._ended.get(key, (now, None))
        longest, roles, total = event, 1, seconds
        if known is not None:
            longest = event if seconds > known.data["longest_seconds"] else known
            roles, total = known.data["roles"] + 1, known.data["seconds"] + seconds
            seconds = max(seconds, known.data["longest_seconds"])
        data = {"seconds": total, "longest_seconds": seconds, "roles": roles, "over": True}
        self._ended[key] = began, replace(longest, data=data)
        return self._take(now - PERIOD_SECONDS)

    def take(self) -> list[Event]:
        """The lines of what was collected; the next ones begin again."""
        return self._take(float("inf"))

    def _take(self, until: float) -> list[Event]:
        old = [key for key, (began, _) in self._ended.items() if began <= until]
        return [self._ended.pop(key)[1] for key in old]
