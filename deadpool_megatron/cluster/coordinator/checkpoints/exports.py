"""Exports, as the coordinator sees them: which generation, who has done what, when one counts.

An export goes through three steps: *taking* (every vault with a role sets the generation aside, and
says so once it is committed), *writing* (one exporter on each of these nodes; the one with role 0
makes a checkpoint of all files), *publishing* (rename, pointers, pruning). Any failure on the way
ends it, and the next one is tried when it is due; neither training nor a recovery waits for one.

A run that has to end exports once more where exports are configured: before a time limit beside the
training, and the dump comes after it, or at half the time that was announced; after a loss that no
spare makes good from the dump, which is on the disk by then.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.checkpoints.durable import (
    DurableError,
    export_directory,
    publish_export,
    remember_and_prune,
)
from deadpool_megatron.cluster.coordinator.checkpoints.export import Export, Leaving, Purpose, Wish
from deadpool_megatron.cluster.coordinator.options import CoordinatorOptions
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import BeginExport, EndRun, ExportDump
from deadpool_megatron.cluster.machine.state.phases import LAST_PHASES, Phase
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.cluster.run_directory.directory import write_json
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.cadence import next_due
from deadpool_megatron.layout.decision import is_kept
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore
from deadpool_megatron.vault.errors import Code

# Iterations between an order and the one it is about; more where iterations are too fast for that.
_FIRST_MARGIN = 2
_LONGEST_MARGIN = 64
# Of the time that is left to a run: the rest is for the dump that follows.
_SHARE_OF_EXPORT = 0.5
# How long at most the dump waits for the room that an unfinished export has taken.
_SHARE_OF_REMOVAL = 0.1
# A process that writes there may be just being killed.
_REMOVALS = 5
_REMOVAL_PAUSE_SECONDS = 0.2


class Exports:
    """See the module text. ``send(node, message)`` reaches an agent. For the coordinator's loop."""

    def __init__(
        self,
        options: CoordinatorOptions,
        state: Callable[[], State],
        emit: Callable[[Event], None],
        feed: Callable[[inputs.Input], None],
        send: Callable[[int, Mapping[str, Any]], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._run = options.run
        self._settings = options.info.settings
        self._world_size = options.info.world_size
        self._run_id = options.info.run_id
        self._term = options.term.number
        self._state = state
        self._send = send
        self._emit = emit
        self._spawn = spawn
        self._feed = feed
        self._count = 0
        self._tried = 0
        self._wish: Wish | None = None
        self._leaving: Leaving | None = None
        self._dumped: ExportDump | None = None
        self._margin = _FIRST_MARGIN
        self._export: Export | None = None
        self._last: dict[str, Any] = {}

    def carry_out(self, order: BeginExport | EndRun | ExportDump) -> None:
        """What the machine wants; the end of it comes back as an input."""
        match order:
            case BeginExport(number, directory):
                self.request(number, directory)
            case EndRun(reason, seconds):
                self.end_run(reason, seconds)
            case ExportDump():
                self.export_dump(order)

    def request(self, number: int, directory: str) -> None:
        """Begin what a user has asked for; the end of it is told as an input. ``number``: of the
        request."""
        self._wish = Wish(Path(directory), Purpose.ASKED, number)
        self._margin = _FIRST_MARGIN
        if self._leaving is not None:
            self._unwish("the run is about to end, and exports once more itself")

    def end_run(self, reason: str, seconds: float | None) -> None:
        """Have the run end with a dump; answer to ``deadpool stop --dump``.

        ``seconds``: how long it may take. Where exports are configured the run trains on meanwhile
        and exports once more, for half that time at most. None: dump next. Orders are repeated;
        the earliest end counts.
        """
        trains, now = self._state().phase is Phase.RUNNING, time.monotonic()
        if seconds is None and self._leaving is not None:
            self._leave(reason, max(0.0, self._leaving.ends - now))
            return
        if seconds is None or not self._settings.exports or not trains:
            self._leave(reason, seconds)
            return
        until, ends = now + _SHARE_OF_EXPORT * seconds, now + seconds
        if (said := self._leaving) is not None:
            self._leaving = replace(said, until=min(until, said.until), ends=min(ends, said.ends))
            return
        self._leaving = Leaving(reason, until, ends, _SHARE_OF_REMOVAL * seconds)
        export = self._export
        if export is None or export.directory != self._directory:
            self._unwish("the run is about to end, and exports once more itself")
            self._wish = Wish(self._directory, Purpose.TIME_LIMIT)
            self._margin = _FIRST_MARGIN
        self._say(
            "info",
            f"{reason}: the run ends within {seconds:g} s; a last checkpoint is written in the"
            f" background, for {_SHARE_OF_EXPORT * seconds:g} s at most, then the state is dumped",
        )

    def export_dump(self, order: ExportDump) -> None:
        """Make a checkpoint of what the vaults have just dumped, from the next tick on. Its end
        comes back as an input."""
        self._dumped = order
        try:
            # The export may take long: whatever becomes of it, and of this coordinator, a run goes
            # on from the state on the disk.
            write_json(self._run.latest, order.restore.to_dict(), lasting=True)
        except OSError as error:
            self._say("warning", f"{self._run.latest} cannot be written yet: {error}")
        if self._export is not None and not self._export.is_publishing:
            self._abandon("the run ends")

    def status(self) -> dict[str, Any]:
        """For people: ``now`` (what is under way), ``last`` (how the last one ended)."""
        export = self._export
        now = {} if export is None else {"iteration": export.iteration, "step": export.step}
        return {"now": now, "last": self._last}

    def heard(self, node: int, message: Mapping[str, Any]) -> None:
        """A report of an agent. Raises LookupError, TypeError or ValueError for malformed ones."""
        export = self._export
        step = str(message["step"])
        if export is None or message["name"] != export.name or node not in export.awaited:
            return
        if step == "failed":
            is_late = message.get("code") == Code.TOO_LATE
            self._abandon(f"node {node}: {message['text']}", again=is_late)
        elif step == "taken" and export.step == "taking":
            for role, (generation, boundary) in message["roles"].items():
                export.said[int(role)] = Generation.from_list(generation), str(boundary)
            export.awaited.remove(node)
            if not export.awaited:
                self._begin_writing(export)
        elif step == "written" and export.step == "writing":
            export.awaited.remove(node)

    def tick(self) -> None:
        """Begin what is due, give up what cannot be finished, publish what is written."""
        export, state = self._export, self._state()
        is_late = self._leaving is not None and time.monotonic() > self._leaving.until
        if self._leaving is not None and is_late and (export is None or export.is_publishing):
            self._leave_by(self._leaving)  # whatever the disk waits for
        elif export is None and (self._leaving is None or self._leaving.removed):
            self._begin_if_due(state)
        elif export is not None and not export.is_publishing:
            self._look_after(export, state, is_late)

    def _look_after(self, export: Export, state: State, is_late: bool) -> None:
        lost = sorted(export.nodes - set(state.fleet.nodes))
        phase = Phase.DUMPING if export.purpose is Purpose.DUMPED else Phase.RUNNING
        if state.phase in LAST_PHASES and state.phase is not phase:
            self._abandon("the run is over")
        elif lost:
            self._abandon(f"node {lost[0]} was lost")
        elif time.monotonic() > export.limit:
            waits = ", ".join(map(str, sorted(export.awaited)))
            limit = self._settings.persist_seconds
            self._abandon(f"{export.step} took more than {limit:g} s on node {waits}")
        elif is_late:
            self._abandon("the rest of the time is needed for the dump")
        elif export.generation is None:
            if state.open_epoch != export.epoch:
                self._abandon(f"epoch {export.epoch} was closed")
        elif not is_kept(state.line.kept, export.generation):
            # Rule 5: it belongs to a line of this run that was left.
            self._abandon("training has gone on from before it")
        elif export.step == "writing" and not export.awaited and state.phase is phase:
            export.step = "publishing"
            self._spawn(self._publish(export, export.generation))

    @property
    def _directory(self) -> Path:
        return export_directory(self._settings, self._run)

    def _begin_if_due(self, state: State) -> None:
        interval = self._settings.persist_interval
        if self._dumped is not None and state.phase is Phase.DUMPING:
            self._begin_dump(self._dumped)
            return
        if state.phase is not Phase.RUNNING or state.record is None:
            if self._leaving is not None:
                self._leave_by(self._leaving)  # a recovery began before its last export did
            return
        newest = max(state.line.newest, state.record.restore.generation.iteration)
        # With a cadence there are generations of every n-th iteration only.
        every = state.record.protection.every
        if self._wish is not None:
            self._begin(state.record, next_due(newest + self._margin, every), self._wish)
            self._wish = None
        elif interval:
            due = next_due(next_due(newest + _FIRST_MARGIN, interval), every)
            if due > self._tried:
                self._begin(state.record, due, Wish(self._directory, Purpose.INTERVAL))

    def _begin(self, record: EpochRecord, iteration: int, wish: Wish) -> None:
        self._tried = iteration
        nodes = frozenset(seat.node for seat in record.seats.values())
        self._export = self._new(iteration, record.epoch, wish, nodes)
        self._order(self._export, "export-take")

    def _begin_dump(self, order: ExportDump) -> None:
        restore, wish = order.restore, Wish(self._directory, Purpose.DUMPED)
        iteration, lineage = restore.generation.iteration, restore.generation.lineage
        export = self._new(iteration, lineage, wish, frozenset(order.roles.values()))
        export.step, export.boundary = "writing", restore.boundary
        export.generation = restore.generation
        self._export, self._dumped = export, None
        dump = {
            "path": restore.path,
            "generation": restore.generation.to_list(),
            "boundary": restore.boundary,
        }
        for node in sorted(export.nodes):
            roles = sorted(role for role, writer in order.roles.items() if writer == node)
            where = {"directory": str(export.unfinished), "dump": {**dump, "roles": roles}}
            self._order(export, "export-dump", only=node, **where)

    def _new(self, iteration: int, epoch: int, wish: Wish, nodes: frozenset[int]) -> Export:
        self._count += 1
        return Export(
            run_id=self._run_id,
            name=f"{self._term}.{self._count}",
            epoch=epoch,
            iteration=iteration,
            directory=wish.directory,
            purpose=wish.purpose,
            number=wish.number,
            limit=time.monotonic() + self._settings.persist_seconds,
            awaited=set(nodes),
            nodes=nodes,
        )

    def _begin_writing(self, export: Export) -> None:
        generation = export.common_generation(self._world_size)
        if generation is None:
            moments = sorted({f"{one.iteration} after {m}" for one, m in export.said.values()})
            self._abandon(f"the roles have not set the same moment aside: {', '.join(moments)}")
            return
        failpoints.hit("coordinator.export", iteration=export.iteration)
        export.generation = generation
        export.step = "writing"
        export.awaited = set(export.nodes)
        self._order(export, "export-write", directory=str(export.unfinished))

    async def _publish(self, export: Export, generation: Generation) -> None:
        loop = asyncio.get_running_loop()
        restore = Restore("durable", generation, export.boundary, str(export.final))
        place = (export.unfinished, export.final, restore, self._run, self._run_id)

        def counts() -> bool:
            # A recovery may have decided while the files were synced.
            return is_kept(self._state().line.kept, generation)

        try:
            await loop.run_in_executor(None, publish_export, *place, counts)
        except DurableError as error:
            self._abandon(f"it did not become valid: {error}")
            return
        path = str(export.final)
        self._last = {"iteration": export.iteration, "path": path, "error": ""}
        data = {"path": path, "background": True}
        self._emit(Event(Kind.DURABLE, generation.lineage, iteration=export.iteration, data=data))
        durable = self._state().line.durable
        # The run itself may have saved a later iteration meanwhile.
        if durable is None or durable.generation.iteration < export.iteration:
            self._feed(inputs.DurableValid(export.iteration, path, export.boundary))
        if export.purpose is not Purpose.ASKED:
            await self._prune(export)
        self._conclude(export, path)

    async def _prune(self, export: Export) -> None:
        state = self._state()
        needed = {state.line.durable.path} if state.line.durable is not None else set[str]()
        # A recovery may just be loading an older one: the next export prunes, then.
        keep = self._settings.persist_keep if state.phase is Phase.RUNNING else 0
        what = (self._run, self._run_id, export.final, keep, needed)
        try:
            await asyncio.get_running_loop().run_in_executor(None, remember_and_prune, *what)
        except DurableError as error:
            self._say("warning", f"old checkpoints are not removed: {error}", export.epoch)

    def _abandon(self, why: str, *, again: bool = False) -> None:
        """Nothing of it is left; what was not due by an interval is tried ``again`` later on, if
        its iteration was overwritten before it was set aside."""
        export = self._export
        assert export is not None
        self._order(export, "export-drop")
        is_wanted = export.purpose is not Purpose.INTERVAL or self._leaving is not None
        if is_wanted and again and self._margin < _LONGEST_MARGIN:
            self._margin *= 2
            self._wish = self._wish or Wish(export.directory, export.purpose, export.number)
        self._last = {"iteration": export.iteration, "path": "", "error": why}
        text = f"no checkpoint of iteration {export.iteration} in the background: {why}"
        self._say("warning", text, export.epoch)
        is_last = self._wish is None and export.purpose is not Purpose.DUMPED
        if self._leaving is not None and is_last:
            until = time.monotonic() + self._leaving.removal_seconds
            self._leaving = replace(self._leaving, until=until, removed=False)
            self._export = None
            self._answer(export, "")
            self._spawn(self._leave_room(export))
        else:
            self._spawn(_remove(export.unfinished))
            self._conclude(export, "")

    async def _leave_room(self, export: Export) -> None:
        """Have the dump after what was written of the export is gone: it may need the room."""
        await _remove(export.unfinished)
        if self._leaving is not None:  # else it was waited for long enough
            self._leave_by(self._leaving)

    def _conclude(self, export: Export, path: str) -> None:
        """It is over; who waits for its end goes on. ``path``: empty if it came to nothing."""
        self._export = None
        self._answer(export, path)
        if export.purpose is Purpose.DUMPED:
            assert export.generation is not None
            self._feed(inputs.DumpExported(export.generation, path))
        elif self._leaving is not None and self._wish is None:
            self._leave_by(self._leaving)

    def _leave_by(self, leaving: Leaving) -> None:
        self._leave(leaving.reason, max(0.0, leaving.ends - time.monotonic()))

    def _answer(self, export: Export, path: str) -> None:
        """Tell who has asked for it, unless it is tried again."""
        if export.number and (self._wish is None or self._wish.number != export.number):
            error = "" if path else self._last["error"]
            self._feed(inputs.Exported(export.number, export.iteration, path, error))

    def _unwish(self, why: str) -> None:
        """What was to begin does not."""
        wish, self._wish = self._wish, None
        if wish is not None and wish.number:
            self._feed(inputs.Exported(wish.number, 0, "", why))

    def _leave(self, reason: str, seconds: float | None) -> None:
        self._leaving = None
        self._unwish("the run ends")
        if self._export is not None and not self._export.is_publishing:
            self._abandon("the run ends")  # it must not write while the nodes dump
        self._feed(inputs.DumpRequested(reason, seconds))

    def _say(self, level: str, text: str, epoch: int | None = None) -> None:
        record = self._state().record
        known = 0 if record is None else record.epoch
        data = {"level": level, "text": text}
        self._emit(Event(Kind.LOG, known if epoch is None else epoch, data=data))

    def _order(self, export: Export, kind: str, only: int | None = None, **content: Any) -> None:
        order = {"t": kind, "name": export.name, "iteration": export.iteration, **content}
        for node in sorted(export.nodes) if only is None else [only]:
            self._send(node, order)


async def _remove(directory: Path) -> None:
    loop = asyncio.get_running_loop()
    for left in reversed(range(_REMOVALS)):
        await loop.run_in_executor(None, lambda: shutil.rmtree(directory, ignore_errors=True))
        if not left or not await loop.run_in_executor(None, directory.exists):
            return
        await asyncio.sleep(_REMOVAL_PAUSE_SECONDS)
