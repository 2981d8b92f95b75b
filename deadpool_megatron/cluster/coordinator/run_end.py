"""The end of a run: the result is written, and the agents are ordered to stop and leave.

Before that the coordinator waits for saves and exports that are being made valid. The wait may last
as long as a save if the program has ended by itself, otherwise as long as the agents may take to
leave. The user may cut the wait short.

The run directory may be full or hang at that moment. The write of the result is retried for as long
as that of a journal entry. Until then no agent is ordered to stop, because without the result the
next run can continue only from the state in the nodes' memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from deadpool_megatron.cluster.coordinator.checkpoints import Checkpoints
from deadpool_megatron.cluster.coordinator.context import Context
from deadpool_megatron.cluster.journal.journal import JournalError
from deadpool_megatron.cluster.machine.actions import Finish
from deadpool_megatron.events import Event, Kind

_PAUSE_SECONDS = 0.5
_LOOK_SECONDS = 0.05
# A longer wait for saves and exports is reported.
_SILENT_SECONDS = 1.0


class RunEnd:
    """See the module text. For the coordinator's loop."""

    def __init__(
        self,
        context: Context,
        checkpoints: Checkpoints,
        newest_term: Callable[[], int],
        end: Callable[[int], None],
    ) -> None:
        """``newest_term()`` reads the journal; ``end(exit_status)`` ends this process."""
        options = context.options
        self._path = options.run.path
        self._term = options.term.number
        settings = options.info.settings
        # Even if spares are not awaited, a disk needs its time to sync.
        self._retry_seconds = max(settings.spare_timeout_seconds, settings.close_seconds)
        self._close_seconds = settings.close_seconds
        self._save_seconds = settings.first_step_seconds
        self._context, self._checkpoints = context, checkpoints
        self._newest_term, self._end = newest_term, end
        self._is_writing = False
        self._is_expedited = False
        self._status = 0

    def finish(self, finish: Finish) -> None:
        """Wait for saves and exports, write the result and order the agents to stop."""
        self._is_writing = True
        self._context.spawn(self._finish(finish))

    def expedite(self) -> None:
        """Stop the wait for saves and exports."""
        self._is_expedited = True

    def exit(self) -> None:
        """End this process, unless the result is still unwritten. In that case the agents will be
        ordered to stop later than the machine assumes, and get their time to leave from then on.
        """
        if not self._is_writing:
            self._end(self._status)

    async def _finish(self, finish: Finish) -> None:
        await self._settle(finish)
        if await self._is_superseded():
            return
        state = self._context.state
        durable, loaded = state.lineage.durable, self._checkpoints.loaded
        finish = finish.with_checkpoint(durable if durable and durable.path not in loaded else None)
        self._status = finish.exit_status
        data = {"exit_status": finish.exit_status, "reason": finish.reason, "kind": finish.kind}
        epoch = 0 if state.record is None else state.record.epoch
        self._context.files.write(Event(Kind.RUN_ENDED, epoch, data=data))
        result = self._context.files.result(finish, state)
        limit = time.monotonic() + self._retry_seconds
        error = await self._write(finish, result, limit)
        if error is None or await self._is_superseded():
            return
        if error:
            text = (
                f"the result of the run (status {result['exit_status']}: {result['reason']}) was"
                f" not written to {self._path}: {error}; its state stays in memory: the same"
                f" command continues from it, 'deadpool clean {self._path}' removes it"
            )
            self._context.warn(text)
            print(text, file=sys.stderr, flush=True)
        keeps = finish.keeps_slots or bool(error)
        stop = {"t": "stop", "reason": str(result["reason"]), "remove": not keeps}
        self._context.peers.send_all(stop)
        self._is_writing = False
        late = time.monotonic() + self._close_seconds
        while self._context.peers.agents and time.monotonic() < late:
            await asyncio.sleep(_LOOK_SECONDS)
        self._end(self._status)

    async def _settle(self, finish: Finish) -> None:
        is_complete = finish.is_early or not finish.exit_status
        limit_seconds = self._save_seconds if is_complete else self._close_seconds
        began, is_reported = time.monotonic(), False
        while pending := ", ".join(self._checkpoints.pending()):
            waited = time.monotonic() - began
            if waited > limit_seconds or self._is_expedited:
                self._context.warn(
                    f"the run ends before this is valid, after {waited:.0f} s: {pending}"
                )
                return
            if waited > _SILENT_SECONDS and not is_reported:
                is_reported = True
                self._context.warn(
                    f"the run ends when this is valid, in {limit_seconds:g} s at most: {pending}"
                )
            await asyncio.sleep(_LOOK_SECONDS)

    async def _write(self, finish: Finish, result: dict[str, Any], limit: float) -> str | None:
        """Return why the result could not be written, empty if it was. Return None if another
        coordinator has taken over, which writes its own result. ``limit``: monotonic seconds.
        """
        last_reason = ""
        while True:
            try:
                async with asyncio.timeout_at(limit):  # a loop has the monotonic clock
                    newest = await asyncio.to_thread(self._write_unless_followed, finish, result)
                if newest <= self._term:
                    return ""
                self._context.superseded(f"term {newest} has begun")
                return None
            except TimeoutError:
                return last_reason or f"it did not answer for {self._retry_seconds:g} s"
            except OSError as error:
                reason = error.strerror or str(error)
            if time.monotonic() > limit:
                return reason
            if reason != last_reason:
                last_reason = reason
                self._context.warn(
                    f"the result cannot be written to {self._path}: {reason};"
                    f" tried again for {self._retry_seconds:g} s"
                )
            await asyncio.sleep(_PAUSE_SECONDS)

    def _write_unless_followed(self, finish: Finish, result: dict[str, Any]) -> int:
        """Write the result if no newer term has begun; return the newest term. Blocks; raises
        OSError.

        Each try checks the term, as a standby may take over while the file system hangs.
        """
        newest = self._term
        with contextlib.suppress(JournalError):  # _is_superseded() has reported the error
            newest = self._newest_term()
        if newest <= self._term:
            self._context.files.write_result(finish, self._context.state, result)
        return newest

    async def _is_superseded(self) -> bool:
        """Return whether a newer term has begun: then its coordinator ends the run instead."""
        try:
            async with asyncio.timeout(self._close_seconds):
                newest = await asyncio.to_thread(self._newest_term)
        except (JournalError, TimeoutError) as error:
            # While the journal does not answer, no standby can claim a term either.
            self._context.warn(str(error) or "the journal does not answer")
            return False
        if newest > self._term:
            self._context.superseded(f"term {newest} has begun")
        return newest > self._term
