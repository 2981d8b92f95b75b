"""Checkpoints on the disk, from the request to the removal: saves, exports, dumps.

The training processes write a *save* themselves. Once all its files exist, they ask the coordinator
to make it valid: to give it its final name and record it as a point of restart.

An *export* is written while training continues, in three steps. *Taking*: the vault of every
training node pins the generation, and reports when it is committed. *Writing*: an exporter on each
of these nodes writes files, and the exporter of role 0 makes a checkpoint of all files.
*Publishing*: the coordinator renames it, updates pointers and prunes. Any failure on the way ends
the export. The next export is tried when it is due: after an interval of iterations if the user has
given an interval, else half an hour after the last checkpoint of any kind, or later if writing
would otherwise take more than a tenth of the time. Neither training nor a recovery waits for an
export.

The *dump* of a run that ends because it has no spare is on the disk, and is exported from there.

Where exports are configured, a run that has to end exports a last time. If its time is about to run
out, it exports while it trains, and dumps its state after that, or when half of the remaining time
has passed. After a loss that no spare replaces, the export is made from the dump.
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
from deadpool_megatron.cluster.coordinator.export_interval import (
    MAX_MARGIN,
    MIN_MARGIN,
    ExportInterval,
)
from deadpool_megatron.cluster.coordinator.new_checkpoint import (
    DurableError,
    NewCheckpoint,
    export_directory,
    list_and_prune,
    remove_unfinished,
)
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import BeginExport, EndRun, ExportDump
from deadpool_megatron.cluster.machine.state import LAST_PHASES, Phase, State
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.planner import is_kept
from deadpool_megatron.layout.records import Generation, Restore, next_due
from deadpool_megatron.vault.errors import Code

# The pause after a checkpoint where the user gave no interval: the first number, or the second
# times the duration of the checkpoint if that is longer.
_USUAL_SECONDS = 1800.0
_PAUSE_FACTOR = 9
# The last export may take this share of a run's remaining time; the dump needs the other part.
_SHARE_OF_EXPORT = 0.5
# The dump waits at most this share of the remaining time for the removal of a failed export.
_SHARE_OF_REMOVAL = 0.1
# Time to enter a dump into latest.json; then the dump is exported, whether entered or not.
_ENTRY_SECONDS = 10.0
_LAST_EXPORT = "the run is about to end, and writes its own last export"


@dataclass(frozen=True)
class ExportRequest:
    """An export that is to begin as soon as possible. ``number``: the number of the user's request,
    0 for an export that no user requested."""

    directory: Path
    number: int = 0


@dataclass
class PendingEnd:
    """The end of a run that waits for its last export.

    The state is dumped when the export is over, at ``dump_at`` at the latest. If the export fails,
    the dump waits until the files of the export are removed, ``removal_seconds`` at most;
    ``is_removed`` is False during that wait. ``ends_at``: when something else ends the run. Times
    are of the monotonic clock."""

    reason: str
    dump_at: float
    ends_at: float
    removal_seconds: float
    is_removed: bool = True


@dataclass
class Export:
    """An export in progress. It is written to the directory ``unfinished``, and given up at
    ``limit`` (monotonic clock). ``boundary``: the last moment after the iteration whose extras the
    export includes; ``dump``: the source, if that is not memory; ``awaited``: the nodes that have
    yet to report the end of the step. ``pinned``: role -> pinned generation and boundary."""

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
    pinned: dict[int, tuple[Generation, str]] = field(default_factory=dict)

    @property
    def is_publishing(self) -> bool:
        """Return whether all files are written; from then on nothing stops the export."""
        return self.step == "publishing"

    @property
    def final(self) -> Path:
        """Return the path of the finished checkpoint."""
        return self.request.directory / f"iter_{self.iteration:07d}"


class Checkpoints:
    """See the module text. For the coordinator's loop."""

    def __init__(self, context: Context) -> None:
        options, self._context = context.options, context
        self._settings = options.info.settings
        self._run, self._run_id = options.run, options.info.run_id
        # The directory of exports whose request names no other directory.
        self._directory = export_directory(self._settings, self._run)
        # The names of exports begin with this text. As it cannot be guessed, no other user can
        # create the directory of an export first.
        self._prefix = f"{options.term.number}.{secrets.token_hex(4)}"
        # A separate thread removes files. The threads of the pool write the journal, and if the
        # disk hangs, each failed export would block another of them.
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="export-removal")
        self._saves: set[tuple[int, int]] = set()
        # Paths of checkpoints that the program has loaded, not written, so that they are no
        # progress. Their lineage is 0.
        valid = options.recovered.valid
        self.loaded = {restore.path for restore in valid if not restore.generation.lineage}
        self._interval = ExportInterval(self._settings.export_iterations)
        # Without an interval of iterations: when the next export is due, by the monotonic clock.
        self._due = time.monotonic() + _USUAL_SECONDS
        self._by_time = self._settings.persist_interval == "auto"
        # Whether a tick has work: there is an interval, or there was an order.
        self.is_used = self._by_time or self._settings.export_iterations > 0
        # Iterations from the newest to the iteration to export; more after an order was too late.
        self._margin = MIN_MARGIN
        self._export_count = 0
        self._request: ExportRequest | None = None
        self._pending_end: PendingEnd | None = None
        self._pending_dump: ExportDump | None = None
        self._export: Export | None = None
        self._last: dict[str, Any] = {}
        # Inputs for the machine. Each method feeds them at its end, since the machine may call
        # carry_out() with the next order before feed() returns.
        self._inputs: list[inputs.Input] = []

    def carry_out(self, order: BeginExport | EndRun | ExportDump) -> None:
        """Carry out an order of the machine; its end is fed back as an input."""
        self.is_used = True
        match order:
            case BeginExport(number, directory):
                self._request, self._margin = ExportRequest(Path(directory), number), MIN_MARGIN
                if self._pending_end is not None:
                    self._refuse_request(_LAST_EXPORT)
            case EndRun(reason, seconds):
                self._end_run(reason, seconds)
            case ExportDump():
                # The export may take long. If it or this coordinator fails, the next run can still
                # continue from the dump on the disk.
                self._context.spawn(self._record_dump(order))
                if self._export is not None and not self._export.is_publishing:
                    self._abandon("the run ends")
        self._feed()

    def pending(self) -> list[str]:
        """Return descriptions of the checkpoints that are being made valid."""
        texts = [f"the checkpoint of iteration {iteration}" for _, iteration in sorted(self._saves)]
        if self._export is not None:
            texts.append(f"the background checkpoint of iteration {self._export.iteration}")
        return texts

    def status(self) -> dict[str, Any]:
        """Return, for people: ``now`` (the current export), ``last`` (the last export's result)."""
        export = self._export
        now = {} if export is None else {"iteration": export.iteration, "step": export.step}
        return {"now": now, "last": self._last}

    async def save(self, m: Mapping[str, Any]) -> None:
        """Make a checkpoint whose files all exist valid, if its epoch is still open. After a
        takeover, agents that have received no result request it again. ``m``: the request.
        """
        save = int(m["epoch"]), int(m["iteration"])
        if save not in self._saves:
            self._saves.add(save)
            try:
                await self._make_valid(m, *save)
            finally:
                self._saves.remove(save)

    def take_report(self, node: int, message: Mapping[str, Any]) -> None:
        """Take an agent's report. Raises LookupError, TypeError or ValueError if malformed."""
        export, step = self._export, str(message["step"])
        if export is None or message["name"] != export.name or node not in export.awaited:
            return
        if step == "failed":
            is_late = message.get("code") == Code.TOO_LATE
            self._abandon(f"node {node}: {message['text']}", again=is_late)
        elif step == "taken" and export.step == "taking":
            for role, (generation, boundary) in message["roles"].items():
                export.pinned[int(role)] = Generation.from_list(generation), str(boundary)
            export.awaited.remove(node)
            if not export.awaited:
                self._begin_writing(export)
        elif step == "written" and export.step == "writing":
            export.awaited.remove(node)
        self._feed()

    def tick(self) -> None:
        """Begin an export that is due, give up an export that cannot finish, or publish an export
        that is written."""
        state, now = self._context.state, time.monotonic()
        self._interval.observe(state.reached)
        export, end = self._export, self._pending_end
        is_late = end is not None and now > end.dump_at
        if end is not None and is_late and (export is None or export.is_publishing):
            self._request_dump(end.reason, end.ends_at)  # even if the disk hangs
        elif export is None and (end is None or end.is_removed):
            self._begin_if_due(state)
        elif export is not None and not export.is_publishing:
            phases = self._phases(export, state)
            if reason := self._failure_reason(export, state, phases, is_late, now):
                self._abandon(reason)
            elif export.step == "writing" and not export.awaited and state.phase in phases:
                export.step = "publishing"
                self._context.spawn(self._publish(export))
        self._feed()

    # The end of a run.

    def _end_run(self, reason: str, seconds: float | None) -> None:
        """End the run with a dump. If exports are configured, or the dump would have fewer roles
        than the next run, the run first exports a last time while it trains, for half of the
        ``seconds`` at most. If the order is repeated, the earliest end counts.
        """
        now, state = time.monotonic(), self._context.state
        end, export = self._pending_end, self._export
        is_small = len(state.seats) < self._context.options.info.world_size
        exports = self._settings.exports or is_small
        if seconds is None or not exports or state.phase is not Phase.RUNNING:
            ends_at = None if end is None else end.ends_at
            self._request_dump(reason, ends_at if seconds is None else now + seconds)
            return
        dump_at, ends_at = now + _SHARE_OF_EXPORT * seconds, now + seconds
        if end is not None:
            end.dump_at, end.ends_at = min(dump_at, end.dump_at), min(ends_at, end.ends_at)
            return
        self._pending_end = PendingEnd(reason, dump_at, ends_at, _SHARE_OF_REMOVAL * seconds)
        if export is None or export.request.directory != self._directory:
            self._refuse_request(_LAST_EXPORT)
            self._request, self._margin = ExportRequest(self._directory), MIN_MARGIN
        text = (
            f"{reason}: the run ends within {seconds:g} s; a last checkpoint is written in the"
            f" background, for {_SHARE_OF_EXPORT * seconds:g} s at most, then the state is dumped"
        )
        epoch = 0 if state.record is None else state.record.epoch
        self._context.files.write(Event(Kind.LOG, epoch, data={"level": "info", "text": text}))

    def _request_dump(self, reason: str, ends_at: float | None) -> None:
        """Give up an export that is not being published, and request the dump that ends the run."""
        self._pending_end = None
        self._refuse_request("the run ends")
        if self._export is not None and not self._export.is_publishing:
            self._abandon("the run ends")  # the export must not write while the nodes dump
        seconds = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        self._inputs.append(inputs.DumpRequested(reason, seconds))

    async def _record_dump(self, order: ExportDump) -> None:
        """Write a dump into latest.json, so that the next start continues from it. Whether or not
        that succeeds, the export of the dump begins at the next tick."""
        dump, path = order.restore, self._run.latest
        try:
            async with asyncio.timeout(_ENTRY_SECONDS):
                await asyncio.to_thread(
                    lambda: run_files.write_latest(path, [dump, *run_files.still_valid(path, dump)])
                )
        except OSError as error:  # TimeoutError is an OSError
            reason = str(error) or "it does not answer"
            self._context.warn(f"{path} cannot be written yet: {reason}")
        self._pending_dump = order

    # The course of an export.

    def _phases(self, export: Export, state: State) -> set[Phase]:
        """Return the phases in which the export may be published."""
        if export.dump is not None:
            return {Phase.DUMPING}
        phases = {Phase.RUNNING}
        if export.generation or export.iteration <= state.reached:
            phases |= {Phase.ENDING, Phase.ENDED}  # the end of the run waits for it
        return phases

    def _failure_reason(
        self, export: Export, state: State, phases: set[Phase], is_late: bool, now: float
    ) -> str:
        """Return why the export cannot be finished; empty if it can."""
        lost = sorted(export.nodes - set(state.fleet.nodes))
        if state.phase in LAST_PHASES and state.phase not in phases:
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
        # The generation may belong to an abandoned lineage, of which nothing may be published.
        has_kept = is_kept(state.lineage.kept, export.generation)
        return "" if has_kept else "training has continued from an earlier state"

    def _begin_if_due(self, state: State) -> None:
        """Begin the export of a dump, of a request or of the interval, if there is any."""
        if state.phase in LAST_PHASES:
            self._refuse_request("the run is over")
        if self._pending_dump is not None and state.phase is Phase.DUMPING:
            self._begin_dump(self._pending_dump)
            return
        if state.phase is not Phase.RUNNING or state.record is None:
            if (end := self._pending_end) is not None:
                # A recovery began before the last export did.
                self._request_dump(end.reason, end.ends_at)
            return
        # With a cadence only every n-th iteration has a generation.
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
        self._export, self._pending_dump = export, None
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
        if not self._export_count:
            # Unfinished exports of an earlier coordinator may occupy the space for this export.
            self._remover.submit(remove_unfinished, self._directory, self._run_id, self._prefix)
        self._export_count += 1
        name = f"{self._prefix}.{self._export_count}"
        limit = time.monotonic() + self._settings.persist_seconds
        unfinished = run_files.unfinished_export(request.directory, self._run_id, name)
        writers = frozenset(nodes)
        return Export(name, epoch, iteration, request, unfinished, limit, writers, set(writers))

    def _order(self, export: Export, step: str, nodes: Iterable[int], **content: Any) -> None:
        order = {"t": f"export-{step}", "name": export.name, "iteration": export.iteration}
        for node in sorted(nodes):
            self._context.peers.order(node, {**order, **content})

    def _order_writing(
        self, export: Export, kind: str, nodes: Iterable[int], roles: Iterable[int], **content: Any
    ) -> None:
        where = {"directory": str(export.unfinished), "roles": sorted(roles)}
        self._order(export, kind, nodes, **where, **content)

    def _begin_writing(self, export: Export) -> None:
        moments = set(export.pinned.values())
        if export.pinned.keys() != self._context.state.seats.keys() or len(moments) != 1:
            text = ", ".join(sorted({f"{each.iteration} after {step}" for each, step in moments}))
            self._abandon(f"the roles have pinned different moments: {text}")
            return
        self._margin = MIN_MARGIN
        if export.request.directory == self._directory:
            self._interval.note_pinned(export.iteration)
        ((export.generation, _),) = moments
        export.step, export.awaited = "writing", set(export.nodes)
        failpoints.hit("coordinator.export", iteration=export.iteration)
        self._order_writing(export, "write", export.nodes, export.pinned)

    async def _publish(self, export: Export) -> None:
        """Give the export its name, prune older exports, then report it."""
        generation, final = export.generation, export.final
        assert generation is not None
        restore = Restore("durable", generation, export.boundary, str(final))
        # Exports that a user requested are never pruned.
        is_automatic = not export.request.number

        def is_current() -> bool:
            # While the files were synced, a recovery may have abandoned this generation.
            return is_kept(self._context.state.lineage.kept, generation)

        new = self._new_checkpoint(export.unfinished, restore, is_current)
        publish = functools.partial(new.publish, may_be_pruned=is_automatic)
        if error := await self._validate(publish, restore, background=True):
            self._abandon(f"it did not become valid: {error}")
            self._feed()
            return
        self._last = {"iteration": export.iteration, "path": restore.path, "error": ""}
        if is_automatic:
            state = self._context.state
            # Outside RUNNING a recovery may be loading an older checkpoint: prune nothing (0).
            keep = self._settings.persist_keep if state.phase is Phase.RUNNING else 0
            needed = {restore.path for restore in state.lineage.valid[:1]}
            arguments = (self._run, self._run_id, final, keep, needed)
            try:
                await asyncio.to_thread(list_and_prune, *arguments)
            except DurableError as error:
                self._context.warn(f"old checkpoints are not removed: {error}")
        self._export = None
        self._answer(export, restore.path)
        if (end := self._pending_end) is not None and self._request is None and export.dump is None:
            self._request_dump(end.reason, end.ends_at)
        self._feed()

    def _abandon(self, reason: str, *, again: bool = False) -> None:
        """Give up the export and remove its files. ``again``: try a later iteration, because this
        iteration was overwritten before it was pinned."""
        export, self._export, end = self._export, None, self._pending_end
        assert export is not None
        self._order(export, "drop", export.nodes)
        is_of_interval = not export.request.number and end is None
        if again and self._margin < MAX_MARGIN:
            self._margin *= 2
            if not is_of_interval:  # an export of the interval is still due
                self._request = self._request or export.request
        else:
            self._margin = MIN_MARGIN
            if is_of_interval and export.generation is None:
                self._interval.note_failed(export.epoch, export.iteration)
            if is_of_interval and self._context.state.standing_epoch == export.epoch:
                # If a recovery ended the export instead, the next export stays due.
                self._due = time.monotonic() + _USUAL_SECONDS
        self._last = {"iteration": export.iteration, "path": "", "error": reason}
        self._context.warn(
            f"no checkpoint of iteration {export.iteration} in the background: {reason}"
        )
        is_last = self._request is None and export.dump is None
        if end is not None and is_last:
            # The dump may need the space of this export, so it waits for the removal.
            end.dump_at = time.monotonic() + end.removal_seconds
            end.is_removed = False
        self._context.spawn(self._remove(export.unfinished, is_last))
        self._answer(export, "")

    async def _remove(self, unfinished: Path, is_last: bool) -> None:
        """Remove the files of a failed export. If it was the last export, then request the dump,
        which may need the space. If an exporter writes more files while it is being killed, its
        agent removes them."""
        remove = functools.partial(shutil.rmtree, unfinished, ignore_errors=True)
        await asyncio.get_running_loop().run_in_executor(self._remover, remove)
        # If the removal took too long, tick() has requested the dump already.
        if is_last and (end := self._pending_end) is not None and not end.is_removed:
            self._request_dump(end.reason, end.ends_at)
            self._feed()

    def _answer(self, export: Export, path: str) -> None:
        """Report the end of an export to the machine, unless it is tried again. ``path``: the path
        of the checkpoint, empty if the export failed."""
        number = export.request.number
        if number and (self._request is None or self._request.number != number):
            error = "" if path else self._last["error"]
            self._inputs.append(inputs.Exported(number, export.iteration, path, error))
        if export.dump is not None:
            self._inputs.append(inputs.DumpExported(export.dump.restore.generation, path))

    def _refuse_request(self, reason: str) -> None:
        """Drop the pending request, if any; report the refusal if a user has made it."""
        request, self._request = self._request, None
        if request is not None and request.number:
            self._inputs.append(inputs.Exported(request.number, 0, "", reason))

    def _feed(self) -> None:
        waiting, self._inputs = self._inputs, []
        for item in waiting:
            self._context.feed(item)

    # Saves.

    async def _make_valid(self, m: Mapping[str, Any], epoch: int, iteration: int) -> None:
        """Make a save valid and report that, or log why it did not become valid."""
        context = self._context
        while context.state.phase in (Phase.BOOTSTRAPPING, Phase.OPENING):
            # After a takeover it is not known yet whether the epoch stays open. A loaded checkpoint
            # is reported before all roles have loaded it. Both phases have a limit.
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

        def is_current() -> bool:
            # A failure may have ended the epoch while the files were synced.
            return context.state.standing_epoch == epoch

        new = self._new_checkpoint(Path(str(m["temporary"])), restore, is_current)
        make = new.enter_loaded if is_loaded else new.make_valid
        if error := await self._validate(make, restore):
            text = f"checkpoint of iteration {iteration} did not become valid: {error}"
            context.files.write(Event(Kind.LOG, epoch, data={"level": "error", "text": text}))
            return
        context.peers.send_all({"t": "durable-done", "iteration": iteration})

    # Saves and exports.

    def _new_checkpoint(
        self, temporary: Path, restore: Restore, is_current: Callable[[], bool]
    ) -> NewCheckpoint:
        place, invalid = (self._run, self._run_id), self._context.state.lineage.invalidated
        return NewCheckpoint(temporary, Path(restore.path), restore, *place, is_current, invalid)

    async def _validate(self, make: Callable[[], Restore], restore: Restore, **data: Any) -> str:
        """Call ``make`` in a thread to make a checkpoint valid, and report it. Return the reason of
        a failure; empty if the checkpoint is valid."""
        try:
            restore = await asyncio.to_thread(make)
        except DurableError as error:
            return str(error)
        now = time.monotonic()
        began = now if self._export is None else self._export.limit - self._settings.persist_seconds
        self._due = now + max(_USUAL_SECONDS, _PAUSE_FACTOR * (now - began))
        (epoch, iteration), data["path"] = restore.generation.to_list(), restore.path
        self._context.files.write(Event(Kind.DURABLE, epoch, iteration=iteration, data=data))
        content = (restore.boundary, restore.identity)
        self._context.feed(inputs.DurableValid(iteration, restore.path, *content))
        return ""
