"""Checkpoints on the disk, from the request for one to what is left of it: saves, exports, dumps.

A *save* is written by the roles themselves, who ask for it to count when all files are there. An
*export* is written beside the training, in three steps: *taking* (every vault with a role sets the
generation aside, and says so once it is committed), *writing* (one exporter on each of these nodes;
the one with role 0 makes a checkpoint of all files), *publishing* (rename, pointers, pruning). Any
failure on the way ends it, and the next one is tried when it is due, every so many iterations or,
where no number is given, half an hour after the last checkpoint of any kind, so that writing takes
a tenth of the time at most; neither training nor a recovery waits for one. A *dump* of a run that
ends for lack of a spare is on the disk, and is exported from there.

A run that has to end exports once more where exports are configured: before a time limit beside the
training, and the dump comes after it, or at half the time that was announced; after a loss that no
spare makes good from the dump.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.context import Context
from deadpool_megatron.cluster.coordinator.durable import (
    DurableError,
    NewCheckpoint,
    export_directory,
    remember_and_prune,
    remove_unfinished,
)
from deadpool_megatron.cluster.coordinator.export_interval import (
    MAX_MARGIN,
    MIN_MARGIN,
    ExportInterval,
)
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import BeginExport, EndRun, ExportDump
from deadpool_megatron.cluster.machine.state import LAST_PHASES, Phase, State
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.planner import is_kept
from deadpool_megatron.layout.records import Generation, Restore, next_due
from deadpool_megatron.vault.errors import Code

# Where nobody says how often: this long after the last one, and so many times what it took.
_USUAL_SECONDS = 1800.0
_MIN_PAUSE = 9
# Of the time that is left to a run: the rest is for the dump that follows.
_SHARE_OF_EXPORT = 0.5
# How long at most the dump waits for the room that an unfinished export has taken.
_SHARE_OF_REMOVAL = 0.1
# A dump that is on the disk waits no longer to be named in latest.json before it is exported.
_POINT_SECONDS = 10.0
_LAST = "the run is about to end, and writes its own last export"


@dataclass(frozen=True)
class ExportRequest:
    """An export that is to begin as soon as it can; ``number``: of the user's request, or 0."""

    directory: Path
    number: int = 0


@dataclass
class PendingEnd:
    """The run is to be dumped and to end when its last export is over, or at ``until``; when that
    one came to nothing, as soon as it is ``removed``, or ``removal_seconds`` after its end.
    ``ends``: when something else ends the run. Times are of the monotonic clock."""

    reason: str
    until: float
    ends: float
    removal_seconds: float
    removed: bool = True


@dataclass
class Export:
    """One that is under way, until ``limit``, written to ``unfinished``. ``boundary``: the last
    moment after the iteration that it includes; ``dump``: what it is made of, if not of memory."""

    name: str
    epoch: int
    iteration: int
    request: ExportRequest
    unfinished: Path
    limit: float
    nodes: frozenset[int]
    awaited: set[int]
    dump: ExportDump | None = None
    step: str = "taking"
    boundary: str = "save"
    generation: Generation | None = None
    said: dict[int, tuple[Generation, str]] = field(default_factory=dict)

    @property
    def is_publishing(self) -> bool:
        """Return whether all of it is written; nothing stops it from here on."""
        return self.step == "publishing"

    @property
    def final(self) -> Path:
        """Return where it will be."""
        return self.request.directory / f"iter_{self.iteration:07d}"


class Checkpoints:
    """See the module text. For the coordinator's loop."""

    def __init__(self, context: Context) -> None:
        options, self._context = context.options, context
        self._settings = options.info.settings
        self._run, self._run_id = options.run, options.info.run_id
        # Of exports that nobody names another one for.
        self._directory = export_directory(self._settings, self._run)
        # Nobody else can make the directory of an export before us: its name cannot be guessed.
        self._term = f"{options.term.number}.{secrets.token_hex(4)}"
        # A thread of its own: the others write the journal, and a disk that hangs would take one
        # of them with each export that it costs.
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="export-removal")
        self._saves: set[tuple[int, int]] = set()
        # Paths of what the program has loaded: nothing that this run has come to.
        self.loaded = {one.path for one in options.recovered.valid if not one.generation.lineage}
        self._interval = ExportInterval(self._settings.export_iterations)
        # Without a number of iterations: when the next one is due, by the monotonic clock.
        self._due = time.monotonic() + _USUAL_SECONDS
        self._by_time = self._settings.persist_interval == "auto"
        # There is something to look at in each tick: an interval, or what was ordered.
        self.is_used = self._by_time or self._settings.export_iterations > 0
        # Iterations between an order and the one it is about; more after one that was too late.
        self._margin = MIN_MARGIN
        self._count = 0
        self._request: ExportRequest | None = None
        self._leaving: PendingEnd | None = None
        self._dumped: ExportDump | None = None
        self._export: Export | None = None
        self._last: dict[str, Any] = {}
        # What the machine is told may come back as its next order: when all else is done.
        self._told: list[inputs.Input] = []

    def carry_out(self, order: BeginExport | EndRun | ExportDump) -> None:
        """Carry out what the machine wants; the end of it comes back as an input."""
        self.is_used = True
        match order:
            case BeginExport(number, directory):
                self._request, self._margin = ExportRequest(Path(directory), number), MIN_MARGIN
                if self._leaving is not None:
                    self._refuse_request(_LAST)
            case EndRun(reason, seconds):
                self._end_run(reason, seconds)
            case ExportDump():
                # The export may take long: whatever becomes of it, and of this coordinator, a run
                # goes on from the state on the disk.
                self._context.spawn(self._point(order))
                if self._export is not None and not self._export.is_publishing:
                    self._abandon("the run ends")
        self._tell()

    def under_way(self) -> list[str]:
        """Return what is being made valid, in words."""
        found = [f"the checkpoint of iteration {one}" for _, one in sorted(self._saves)]
        if self._export is not None:
            found.append(f"the background checkpoint of iteration {self._export.iteration}")
        return found

    def status(self) -> dict[str, Any]:
        """For people: ``now`` (the export under way), ``last`` (how the last one ended)."""
        export = self._export
        now = {} if export is None else {"iteration": export.iteration, "step": export.step}
        return {"now": now, "last": self._last}

    async def save(self, m: Mapping[str, Any]) -> None:
        """All files are written: make the checkpoint valid, if its epoch is still the open one.
        After a takeover it is asked again, by agents that have heard of no end.
        """
        which = int(m["epoch"]), int(m["iteration"])
        if which not in self._saves:
            self._saves.add(which)
            try:
                await self._make_valid(m, *which)
            finally:
                self._saves.remove(which)

    def heard(self, node: int, message: Mapping[str, Any]) -> None:
        """A report of an agent. Raises LookupError, TypeError or ValueError for malformed ones."""
        export, step = self._export, str(message["step"])
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
        self._tell()

    def tick(self) -> None:
        """Begin what is due, give up what cannot be finished, publish what is written."""
        state, now = self._context.state, time.monotonic()
        self._interval.observe(state.reached)
        export, leaving = self._export, self._leaving
        is_late = leaving is not None and now > leaving.until
        if leaving is not None and is_late and (export is None or export.is_publishing):
            self._leave(leaving.reason, leaving.ends)  # whatever the disk waits for
        elif export is None and (leaving is None or leaving.removed):
            self._begin_if_due(state)
        elif export is not None and not export.is_publishing:
            wanted = self._phases(export, state)
            if why := self._trouble(export, state, wanted, is_late, now):
                self._abandon(why)
            elif export.step == "writing" and not export.awaited and state.phase in wanted:
                export.step = "publishing"
                self._context.spawn(self._publish(export))
        self._tell()

    # The end of a run.

    def _end_run(self, reason: str, seconds: float | None) -> None:
        """Have the run end with a dump. Where exports are configured the run trains on meanwhile
        and exports once more, for half of the ``seconds`` at most. Orders are repeated; the
        earliest end counts.
        """
        now, state = time.monotonic(), self._context.state
        said, export = self._leaving, self._export
        if seconds is None or not self._settings.exports or state.phase is not Phase.RUNNING:
            ends = None if said is None else said.ends
            self._leave(reason, ends if seconds is None else now + seconds)
            return
        until, ends = now + _SHARE_OF_EXPORT * seconds, now + seconds
        if said is not None:
            said.until, said.ends = min(until, said.until), min(ends, said.ends)
            return
        self._leaving = PendingEnd(reason, until, ends, _SHARE_OF_REMOVAL * seconds)
        if export is None or export.request.directory != self._directory:
            self._refuse_request(_LAST)
            self._request, self._margin = ExportRequest(self._directory), MIN_MARGIN
        text = (
            f"{reason}: the run ends within {seconds:g} s; a last checkpoint is written in the"
            f" background, for {_SHARE_OF_EXPORT * seconds:g} s at most, then the state is dumped"
        )
        epoch = 0 if state.record is None else state.record.epoch
        self._context.files.write(Event(Kind.LOG, epoch, data={"level": "info", "text": text}))

    def _leave(self, reason: str, ends: float | None) -> None:
        self._leaving = None
        self._refuse_request("the run ends")
        if self._export is not None and not self._export.is_publishing:
            self._abandon("the run ends")  # it must not write while the nodes dump
        seconds = None if ends is None else max(0.0, ends - time.monotonic())
        self._told.append(inputs.DumpRequested(reason, seconds))

    async def _point(self, order: ExportDump) -> None:
        """Have the next start continue from this dump, if it can be; a checkpoint is made of it
        from the next tick on."""
        dump, latest = order.restore, self._run.latest
        try:
            async with asyncio.timeout(_POINT_SECONDS):
                await asyncio.to_thread(
                    lambda: run_files.point_at(latest, [dump, *run_files.still_valid(latest, dump)])
                )
        except OSError as error:  # TimeoutError is one
            why = str(error) or "it does not answer"
            self._context.warn(f"{latest} cannot be written yet: {why}")
        self._dumped = order

    # The course of an export.

    def _phases(self, export: Export, state: State) -> set[Phase]:
        """Return the phases in which it may be published."""
        if export.dump is not None:
            return {Phase.DUMPING}
        wanted = {Phase.RUNNING}
        if export.generation or export.iteration <= state.reached:
            wanted |= {Phase.ENDING, Phase.ENDED}  # which waits for it
        return wanted

    def _trouble(
        self, export: Export, state: State, wanted: set[Phase], is_late: bool, now: float
    ) -> str:
        """Return why it cannot be finished; empty if it can."""
        lost = sorted(export.nodes - set(state.fleet.nodes))
        if state.phase in LAST_PHASES and state.phase not in wanted:
            return "the run is over"
        if lost:
            return f"node {lost[0]} was lost"
        if now > export.limit:
            waits = ", ".join(map(str, sorted(export.awaited)))
            limit = self._settings.persist_seconds
            return f"{export.step} took more than {limit:g} s on node {waits}"
        if is_late:
            return "the rest of the time is needed for the dump"
        if export.generation is None:
            is_closed = state.standing_epoch != export.epoch
            return f"epoch {export.epoch} was closed" if is_closed else ""
        # Rule 5: it may belong to a line of this run that was left.
        kept = is_kept(state.lineage.kept, export.generation)
        return "" if kept else "training has continued from an earlier state"

    def _begin_if_due(self, state: State) -> None:
        if state.phase in LAST_PHASES:
            self._refuse_request("the run is over")
        if self._dumped is not None and state.phase is Phase.DUMPING:
            self._begin_dump(self._dumped)
            return
        if state.phase is not Phase.RUNNING or state.record is None:
            if (leaving := self._leaving) is not None:
                # A recovery began before its last export did.
                self._leave(leaving.reason, leaving.ends)
            return
        # With a cadence there are generations of every n-th iteration only.
        epoch, every = state.record.epoch, state.record.protection.every
        request, self._request = self._request, None
        if request is not None:
            iteration: int | None = next_due(state.reached + self._margin, every)
        else:
            request = ExportRequest(self._directory)
            iteration = self._interval.due(epoch, every, self._margin)
            if self._by_time and time.monotonic() >= self._due:
                iteration = next_due(state.reached + self._margin, every)
        if iteration is not None:
            nodes = (seat.node for seat in state.record.seats.values())
            self._export = self._new(iteration, epoch, request, nodes)
            self._order(self._export, "take", self._export.nodes)

    def _begin_dump(self, order: ExportDump) -> None:
        restore, request = order.restore, ExportRequest(self._directory)
        iteration, lineage = restore.generation.iteration, restore.generation.lineage
        export = self._new(iteration, lineage, request, order.roles.values())
        export.dump, export.step, export.boundary = order, "writing", restore.boundary
        export.generation = restore.generation
        self._export, self._dumped = export, None
        dump = {
            "path": restore.path,
            "generation": restore.generation.to_list(),
            "boundary": restore.boundary,
        }
        for node in sorted(export.nodes):
            roles = sorted(role for role, writer in order.roles.items() if writer == node)
            self._order_writing(export, "dump", [node], order.roles, dump={**dump, "roles": roles})

    def _new(
        self, iteration: int, epoch: int, request: ExportRequest, nodes: Iterable[int]
    ) -> Export:
        if not self._count:
            # What an earlier coordinator has left may take the room of this one.
            self._remover.submit(remove_unfinished, self._directory, self._run_id, self._term)
        self._count += 1
        name = f"{self._term}.{self._count}"
        limit = time.monotonic() + self._settings.persist_seconds
        unfinished = run_files.unfinished_export(request.directory, self._run_id, name)
        there = frozenset(nodes)
        return Export(name, epoch, iteration, request, unfinished, limit, there, set(there))

    def _order(self, export: Export, what: str, nodes: Iterable[int], **content: Any) -> None:
        order = {"t": f"export-{what}", "name": export.name, "iteration": export.iteration}
        for node in sorted(nodes):
            self._context.peers.order(node, {**order, **content})

    def _order_writing(
        self, export: Export, kind: str, nodes: Iterable[int], roles: Iterable[int], **content: Any
    ) -> None:
        where = {"directory": str(export.unfinished), "roles": sorted(roles)}
        self._order(export, kind, nodes, **where, **content)

    def _begin_writing(self, export: Export) -> None:
        found = set(export.said.values())
        if export.said.keys() != self._context.state.seats.keys() or len(found) != 1:
            moments = ", ".join(sorted({f"{one.iteration} after {m}" for one, m in found}))
            self._abandon(f"the roles have pinned different moments: {moments}")
            return
        self._margin = MIN_MARGIN
        if export.request.directory == self._directory:
            self._interval.taken(export.iteration)
        ((export.generation, _),) = found
        export.step, export.awaited = "writing", set(export.nodes)
        failpoints.hit("coordinator.export", iteration=export.iteration)
        self._order_writing(export, "write", export.nodes, export.said)

    async def _publish(self, export: Export) -> None:
        """Give it its name, prune older ones, then say so."""
        generation, final = export.generation, export.final
        assert generation is not None
        restore = Restore("durable", generation, export.boundary, str(final))
        # Of what somebody has asked for nothing is pruned.
        is_own = not export.request.number

        def counts() -> bool:
            # A recovery may have decided while the files were synced.
            return is_kept(self._context.state.lineage.kept, generation)

        new = self._new_checkpoint(export.unfinished, restore, counts)
        publish = functools.partial(new.publish, may_be_pruned=is_own)
        if error := await self._valid(publish, restore, background=True):
            self._abandon(f"it did not become valid: {error}")
            self._tell()
            return
        self._last = {"iteration": export.iteration, "path": restore.path, "error": ""}
        if is_own:
            state = self._context.state
            # A recovery may just be loading an older one: the next export prunes, then.
            keep = self._settings.persist_keep if state.phase is Phase.RUNNING else 0
            needed = {one.path for one in state.lineage.valid[:1]}
            place_of_list = (self._run, self._run_id, final, keep, needed)
            try:
                await asyncio.to_thread(remember_and_prune, *place_of_list)
            except DurableError as error:
                self._context.warn(f"old checkpoints are not removed: {error}")
        self._export = None
        self._answer(export, restore.path)
        if (leaving := self._leaving) is not None and self._request is None and export.dump is None:
            self._leave(leaving.reason, leaving.ends)
        self._tell()

    def _abandon(self, why: str, *, again: bool = False) -> None:
        """Nothing of it is left; a later iteration is tried ``again``, if its own was overwritten
        before it was set aside."""
        export, self._export, leaving = self._export, None, self._leaving
        assert export is not None
        self._order(export, "drop", export.nodes)
        is_of_interval = not export.request.number and leaving is None
        if again and self._margin < MAX_MARGIN:
            self._margin *= 2
            if not is_of_interval:  # else it is still due
                self._request = self._request or export.request
        else:
            self._margin = MIN_MARGIN
            if is_of_interval and export.generation is None:
                self._interval.failed(export.epoch, export.iteration)
            if is_of_interval and self._context.state.standing_epoch == export.epoch:
                self._due = time.monotonic() + _USUAL_SECONDS  # else a recovery came in between
        self._last = {"iteration": export.iteration, "path": "", "error": why}
        self._context.warn(
            f"no checkpoint of iteration {export.iteration} in the background: {why}"
        )
        is_last = self._request is None and export.dump is None
        if leaving is not None and is_last:
            # The dump may need the room that it has taken: it waits until that is removed.
            leaving.until = time.monotonic() + leaving.removal_seconds
            leaving.removed = False
        self._context.spawn(self._remove(export.unfinished, is_last))
        self._answer(export, "")

    async def _remove(self, unfinished: Path, is_last: bool) -> None:
        """Remove what is left of an export; of the last one a dump waits for the room. What a
        process that is just being killed still writes its agent removes."""
        remove = functools.partial(shutil.rmtree, unfinished, ignore_errors=True)
        await asyncio.get_running_loop().run_in_executor(self._remover, remove)
        # Without it was waited for long enough.
        if is_last and (leaving := self._leaving) is not None and not leaving.removed:
            self._leave(leaving.reason, leaving.ends)
            self._tell()

    def _answer(self, export: Export, path: str) -> None:
        """Tell who waits for its end, unless it is tried again. ``path``: empty if it came to
        nothing."""
        number = export.request.number
        if number and (self._request is None or self._request.number != number):
            error = "" if path else self._last["error"]
            self._told.append(inputs.Exported(number, export.iteration, path, error))
        if export.dump is not None:
            self._told.append(inputs.DumpExported(export.dump.restore.generation, path))

    def _refuse_request(self, why: str) -> None:
        """Drop what was to begin."""
        request, self._request = self._request, None
        if request is not None and request.number:
            self._told.append(inputs.Exported(request.number, 0, "", why))

    def _tell(self) -> None:
        told, self._told = self._told, []
        for one in told:
            self._context.feed(one)

    # Saves.

    async def _make_valid(self, m: Mapping[str, Any], epoch: int, iteration: int) -> None:
        context = self._context
        while context.state.phase in (Phase.BOOTSTRAPPING, Phase.OPENING):
            # After a takeover it is not known yet whether the epoch stays open; and what was loaded
            # is told before all roles have. Either phase ends.
            await asyncio.sleep(self._settings.beat_interval_seconds)
        if epoch != context.state.standing_epoch:
            context.peers.refuse("durable-request", f"of epoch {epoch}, which is not open")
            return
        failpoints.hit("coordinator.durable", epoch=epoch, iteration=iteration)
        path = str(Path(str(m["final"])))
        is_loaded = bool(m.get("loaded"))
        if is_loaded:
            self.loaded.add(path)
        restore = Restore("durable", Generation(0 if is_loaded else epoch, iteration), "save", path)

        def counts() -> bool:
            # A failure may have ended the epoch while the files were synced.
            return context.state.standing_epoch == epoch

        new = self._new_checkpoint(Path(str(m["temporary"])), restore, counts)
        make = new.remember if is_loaded else new.make_valid
        if error := await self._valid(make, restore):
            text = f"checkpoint of iteration {iteration} did not become valid: {error}"
            context.files.write(Event(Kind.LOG, epoch, data={"level": "error", "text": text}))
            return
        context.peers.send_all({"t": "durable-done", "iteration": iteration})

    # Both.

    def _new_checkpoint(
        self, temporary: Path, restore: Restore, counts: Callable[[], bool]
    ) -> NewCheckpoint:
        place, struck = (self._run, self._run_id), self._context.state.lineage.struck
        return NewCheckpoint(temporary, Path(restore.path), restore, *place, counts, struck)

    async def _valid(self, make: Callable[[], Restore], restore: Restore, **data: Any) -> str:
        """Have it made valid in a thread, and tell of it; return why it is not, empty if it is."""
        try:
            restore = await asyncio.to_thread(make)
        except DurableError as error:
            return str(error)
        now = time.monotonic()
        began = now if self._export is None else self._export.limit - self._settings.persist_seconds
        self._due = now + max(_USUAL_SECONDS, _MIN_PAUSE * (now - began))
        (epoch, iteration), data["path"] = restore.generation.to_list(), restore.path
        self._context.files.write(Event(Kind.DURABLE, epoch, iteration=iteration, data=data))
        how = (restore.boundary, restore.identity)
        self._context.feed(inputs.DurableValid(iteration, restore.path, *how))
        return ""
