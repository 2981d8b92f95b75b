"""The files in which a run tells what happened: events, ``final.json``, ``latest.json`` and
``account.json``.

Belongs to the coordinator, which writes them and decides nothing from what is in them. Each term
has an event file of its own: an old coordinator that wakes up once more cannot write into that of
the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from deadpool_megatron.cluster.coordinator.progress import Progress
from deadpool_megatron.cluster.coordinator.reporting.bad_nodes import BadNodes
from deadpool_megatron.cluster.coordinator.reporting.commit_digest import KINDS, CommitDigest
from deadpool_megatron.cluster.coordinator.reporting.event_writer import EventWriter
from deadpool_megatron.cluster.coordinator.reporting.live_account import LiveAccount
from deadpool_megatron.cluster.coordinator.reporting.wait_digest import WaitDigest
from deadpool_megatron.cluster.machine.actions import Finish
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.run_directory.directory import (
    RUN_FILE,
    RunDirectory,
    RunInfo,
    point_at,
    read_valid,
    still_valid,
    write_json,
)
from deadpool_megatron.events import Event, EventLog, Kind
from deadpool_megatron.file_systems import HeldName
from deadpool_megatron.observe.notify import notices
from deadpool_megatron.ownership import OwnershipError

_PAUSE_SECONDS = 1.0
# So long the end of a run waits for whoever is to be told of it.
_NOTICE_SECONDS = 5.0
# So long for a file of some kilobytes, which the next coordinator can do without.
_ACCOUNT_SECONDS = 1.0
# For who looks for the cause of a slow commit: "all" has each role's seals, commits and waits
# written.
DETAIL_VARIABLE = "DEADPOOL_EVENT_DETAIL"


class RunFiles:
    """``progress``: what the result of the run is made of."""

    def __init__(self, run: RunDirectory, info: RunInfo, term: int, progress: Progress) -> None:
        self._run = run
        self._info = info
        self._progress = progress
        self._is_brief = os.environ.get(DETAIL_VARIABLE) != "all"
        self._commits, self._waits = CommitDigest(), WaitDigest()
        self.account = LiveAccount(run.events, term)
        self.writer = EventWriter(EventLog(run.events, term))
        notify, on_event = info.settings.notify, info.settings.on_event
        self._notices = notices(info.run_id, notify, on_event, self._warn)
        bad_node_command = info.settings.bad_node_command
        self._bad_nodes = BadNodes(run, info.run_id, bad_node_command, self._warn)

    def write(self, event: Event) -> None:
        """Have an event written, or a digest of many in its place."""
        if self._is_brief and event.kind in KINDS:
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
            **self.account.to_dict(),
        }

    def write_result(self, end: Finish, state: State, result: Mapping[str, Any]) -> None:
        """Write the last files: where to continue, if that is anywhere, then the result. Blocks;
        raises OSError.

        A checkpoint with the update of a loss that was not finite is not named any more: no record
        follows that would say so to the next run.
        """
        if end.resume is not None:
            left = state.blame.trusted(still_valid(self._run.latest, end.resume))
            point_at(self._run.latest, [end.resume, *left])
        else:
            with contextlib.suppress(FileNotFoundError, ValueError):
                known = read_valid(self._run.latest)
                trusted = state.blame.trusted(known)
                if not trusted:
                    self._run.latest.unlink()
                elif trusted != known:
                    point_at(self._run.latest, trusted)
        write_json(self._run.final, result, lasting=True)

    async def show_address(self, values: Mapping[str, Any]) -> None:
        """Write ``coordinator.json``, as soon as that is possible."""
        while True:
            try:
                await asyncio.to_thread(write_json, self._run.coordinator, values)
            except OSError:
                await asyncio.sleep(_PAUSE_SECONDS)  # the event writer tells what is wrong
            else:
                return

    async def keep_name(self) -> None:
        """Whoever asks for the run looks for its ``run.json``: written again where somebody else
        has removed it."""
        name = HeldName(self._run.path / RUN_FILE, partial(self._run.create, self._info))
        while True:
            await asyncio.sleep(_PAUSE_SECONDS)
            try:
                if await asyncio.to_thread(name.look):
                    self._warn(
                        f"{RUN_FILE} was removed, by a cleaner of files, it seems: made anew"
                    )
            except (OSError, OwnershipError):
                pass  # away with its directory, or full; the event writer tells what is wrong

    def _write_all(self, events: list[Event]) -> None:
        for event in events:
            self.account.add(event)
            self.writer.write(event)
            self._notices.note(event)
            self._bad_nodes.note(event)
        self.account.keep(self.writer.accepted_bytes)

    def _warn(self, text: str) -> None:
        """A line for people; in any thread."""
        self.writer.write(Event(Kind.LOG, data={"level": "warning", "text": text}))

    def hand_over(self) -> None:
        """Another coordinator tells from here on: what was collected is left unsaid."""
        self._take_digests()
        self.account.hand_over()

    def _take_digests(self) -> list[Event]:
        """Return what was collected and not written yet."""
        digest = self._commits.take()
        return [*([] if digest is None else [digest]), *self._waits.take()]

    def close(self, limit_seconds: float) -> None:
        """Write what is left of the events, for so long at most."""
        self._write_all(self._take_digests())
        self.account.keep(self.writer.accepted_bytes, at_once=True)
        until = time.monotonic() + min(limit_seconds, _NOTICE_SECONDS)
        self._bad_nodes.flush(until)
        self._notices.flush(until)
        self.account.close(_ACCOUNT_SECONDS)
        if left := self.writer.close(limit_seconds):
            print(f"{left} events could not be written", file=sys.stderr)
