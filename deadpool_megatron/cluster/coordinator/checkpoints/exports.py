"""Exports, carried out: orders to agents, files moved in threads. What is done when is decided in
export_course.py.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.checkpoints.durable import (
    DurableError,
    export_directory,
    publish_export,
    remember_and_prune,
    remove_unfinished,
)
from deadpool_megatron.cluster.coordinator.checkpoints.export import Purpose
from deadpool_megatron.cluster.coordinator.checkpoints.export_course import (
    Effect,
    ExportCourse,
    Order,
    Point,
    Publish,
    Remove,
)
from deadpool_megatron.cluster.coordinator.options import Desk
from deadpool_megatron.cluster.machine.actions import BeginExport, EndRun, ExportDump
from deadpool_megatron.cluster.run_directory.directory import point_at, still_valid
from deadpool_megatron.events import Event
from deadpool_megatron.layout.planner import is_kept
from deadpool_megatron.layout.records import Restore

# A process that writes there may be just being killed.
_REMOVALS = 5
_REMOVAL_PAUSE_SECONDS = 0.2
# A dump that is on the disk waits no longer to be named in latest.json before it is exported.
_POINT_SECONDS = 10.0


class Exports:
    """See the module text. ``send(node, message)`` reaches an agent. For the coordinator's loop."""

    def __init__(self, desk: Desk, send: Callable[[int, Mapping[str, Any]], None]) -> None:
        options = desk.options
        self._run = options.run
        self._run_id = options.info.run_id
        self._desk = desk
        self._send = send
        # A thread of its own: the others write the journal, and a disk that hangs would take one
        # of them with each export that it costs.
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="export-removal")
        self._directory = export_directory(options.info.settings, options.run)
        # Nobody else can make the directory of an export before us: its name cannot be guessed.
        self._term = f"{options.term.number}.{secrets.token_hex(4)}"
        self._has_ordered = False
        self._course = ExportCourse(
            options.info.settings,
            options.info.world_size,
            options.info.run_id,
            self._term,
            self._directory,
        )

    def carry_out(self, order: BeginExport | EndRun | ExportDump) -> None:
        """Carry out what the machine wants; the end of it comes back as an input."""
        self._course.carry_out(order, self._desk.state(), time.monotonic())
        self._do()

    def under_way(self) -> list[str]:
        """Return what is being made valid, in words."""
        now = self._course.status()["now"]
        return [f"the background checkpoint of iteration {now['iteration']}"] if now else []

    def status(self) -> dict[str, Any]:
        """For people: ``now`` (what is under way), ``last`` (how the last one ended)."""
        return self._course.status()

    def heard(self, node: int, message: Mapping[str, Any]) -> None:
        """A report of an agent. Raises LookupError, TypeError or ValueError for malformed ones."""
        self._course.heard(node, message, time.monotonic())
        self._do()

    def tick(self) -> None:
        """Begin what is due, give up what cannot be finished, publish what is written."""
        self._course.tick(self._desk.state(), time.monotonic())
        self._do()

    def _do(self) -> None:
        effects, self._course.effects = self._course.effects, []
        for effect in effects:
            self._do_one(effect)

    def _do_one(self, effect: Effect) -> None:
        match effect:
            case Order(node, message):
                if not self._has_ordered:
                    # What an earlier coordinator has left may take the room of this one.
                    self._has_ordered = True
                    place = (self._directory, self._run_id, self._term)
                    self._remover.submit(remove_unfinished, *place)
                if message["t"] == "export-write":
                    failpoints.hit("coordinator.export", iteration=message["iteration"])
                self._send(node, message)
            case Event():
                self._desk.emit(effect)
            case Point(order):
                self._desk.spawn(self._point(order))
            case Publish():
                self._desk.spawn(self._publish(effect))
            case Remove():
                self._desk.spawn(self._remove(effect))
            case _:
                self._desk.feed(effect)

    async def _point(self, order: ExportDump) -> None:
        try:
            async with asyncio.timeout(_POINT_SECONDS):
                await asyncio.to_thread(self._point_first, order.restore)
        except OSError as error:  # TimeoutError is one
            why = str(error) or "it does not answer"
            self._desk.warn(f"{self._run.latest} cannot be written yet: {why}")
        self._course.pointed(order)

    def _point_first(self, dump: Restore) -> None:
        point_at(self._run.latest, [dump, *still_valid(self._run.latest, dump)])

    async def _publish(self, what: Publish) -> None:
        export, error = what.export, ""
        restore = Restore("durable", what.generation, export.boundary, str(export.final))
        place = (export.unfinished, export.final, restore, self._run, self._run_id)
        struck = self._desk.state().line.struck
        may_be_pruned = export.purpose is not Purpose.ASKED

        def counts() -> bool:
            # A recovery may have decided while the files were synced.
            return is_kept(self._desk.state().line.kept, what.generation)

        try:
            await asyncio.to_thread(
                publish_export, *place, counts, struck, may_be_pruned=may_be_pruned
            )
        except DurableError as failure:
            error = str(failure)
        self._course.published(export, self._desk.state(), error, time.monotonic())
        self._do()
        if not error:
            error = await self._prune(what)
            self._course.pruned(export, error, time.monotonic())
            self._do()

    async def _prune(self, what: Publish) -> str:
        """Return why old exports could not be removed, empty if they could."""
        state = self._desk.state()
        keep = self._course.keep(what.export, state)
        if keep is None:
            return ""
        needed = {one.path for one in state.line.valid[:1]}
        place = (self._run, self._run_id, what.export.final, keep, needed)
        try:
            await asyncio.to_thread(remember_and_prune, *place)
        except DurableError as error:
            return str(error)
        return ""

    async def _remove(self, what: Remove) -> None:
        remove = functools.partial(shutil.rmtree, what.unfinished, ignore_errors=True)
        loop = asyncio.get_running_loop()
        for left in reversed(range(_REMOVALS)):
            await loop.run_in_executor(self._remover, remove)
            if not left or not await loop.run_in_executor(self._remover, what.unfinished.exists):
                break
            await asyncio.sleep(_REMOVAL_PAUSE_SECONDS)
        if what.is_awaited:
            self._course.removed(time.monotonic())
            self._do()
