"""The course of exports: which generation, who has done what, when one counts. Pure: what is to
be done comes out as effects, of which exports.py takes care.

An export goes through three steps: *taking* (every vault with a role sets the generation aside, and
says so once it is committed), *writing* (one exporter on each of these nodes; the one with role 0
makes a checkpoint of all files), *publishing* (rename, pointers, pruning). Any failure on the way
ends it, and the next one is tried when it is due (interval.py); neither training nor a recovery
waits for one.

A run that has to end exports once more where exports are configured: before a time limit beside the
training, and the dump comes after it, or at half the time that was announced; after a loss that no
spare makes good from the dump, which is on the disk by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.coordinator.checkpoints.export import Export, Leaving, Purpose, Wish
from deadpool_megatron.cluster.coordinator.checkpoints.interval import (
    FIRST_MARGIN,
    LONGEST_MARGIN,
    Interval,
)
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import BeginExport, EndRun, ExportDump
from deadpool_megatron.cluster.machine.state.phases import LAST_PHASES, Phase
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.cadence import next_due
from deadpool_megatron.layout.planner import is_kept
from deadpool_megatron.layout.records import EpochRecord, Generation
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.errors import Code

# Of the time that is left to a run: the rest is for the dump that follows.
_SHARE_OF_EXPORT = 0.5
# How long at most the dump waits for the room that an unfinished export has taken.
_SHARE_OF_REMOVAL = 0.1


@dataclass(frozen=True)
class Order:
    """A message for the agent of a node."""

    node: int
    message: Mapping[str, Any]


@dataclass(frozen=True)
class Publish:
    """Give a written export its name, prune older ones, then say so (``published``)."""

    export: Export
    generation: Generation


@dataclass(frozen=True)
class Point:
    """Have the next start continue from a dump, then say so (``pointed``)."""

    order: ExportDump


@dataclass(frozen=True)
class Remove:
    """Remove what is left of an export. ``is_awaited``: say so then (``removed``)."""

    unfinished: Path
    is_awaited: bool


Effect = Order | Publish | Point | Remove | Event | inputs.Input


class ExportCourse:
    """See the module text. ``now`` is monotonic seconds; effects are taken after each call."""

    def __init__(
        self, settings: Settings, world_size: int, run_id: str, term: str, directory: Path
    ) -> None:
        """``directory``: of exports that nobody names another one for; ``term``: first part of
        their names until they are whole."""
        self._settings = settings
        self._world_size = world_size
        self._run_id = run_id
        self._term = term
        self._directory = directory
        self.effects: list[Effect] = []
        self._count = 0
        self._interval = Interval(settings.persist_interval)
        self._wish: Wish | None = None
        self._leaving: Leaving | None = None
        self._dumped: ExportDump | None = None
        # Iterations between an order and the one it is about; more after one that was too late.
        self._margin = FIRST_MARGIN
        self._export: Export | None = None
        self._last: dict[str, Any] = {}

    def carry_out(self, order: BeginExport | EndRun | ExportDump, state: State, now: float) -> None:
        """Carry out what the machine wants; the end of it comes back as an input."""
        match order:
            case BeginExport(number, directory):
                self._request(Wish(Path(directory), Purpose.ASKED, number))
            case EndRun(reason, seconds):
                self._end_run(reason, seconds, state, now)
            case ExportDump():
                # The export may take long: whatever becomes of it, and of this coordinator, a run
                # goes on from the state on the disk.
                self.effects.append(Point(order))
                if self._export is not None and not self._export.is_publishing:
                    self._abandon("the run ends", now)

    def _request(self, wish: Wish) -> None:
        self._wish = wish
        self._margin = FIRST_MARGIN
        if self._leaving is not None:
            self._unwish("the run is about to end, and exports once more itself")

    def _end_run(self, reason: str, seconds: float | None, state: State, now: float) -> None:
        """Have the run end with a dump. Where exports are configured the run trains on meanwhile
        and exports once more, for half of the ``seconds`` at most. Orders are repeated; the
        earliest end counts.
        """
        if seconds is None and self._leaving is not None:
            self._leave(reason, max(0.0, self._leaving.ends - now), now)
            return
        if seconds is None or not self._settings.exports or state.phase is not Phase.RUNNING:
            self._leave(reason, seconds, now)
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
            self._margin = FIRST_MARGIN
        text = (
            f"{reason}: the run ends within {seconds:g} s; a last checkpoint is written in the"
            f" background, for {_SHARE_OF_EXPORT * seconds:g} s at most, then the state is dumped"
        )
        self._say("info", text, 0 if state.record is None else state.record.epoch)

    def pointed(self, order: ExportDump) -> None:
        """The next start continues from this dump, or it was tried for long enough: a checkpoint is
        made of it from the next tick on."""
        self._dumped = order

    def status(self) -> dict[str, Any]:
        """For people: ``now`` (what is under way), ``last`` (how the last one ended)."""
        export = self._export
        now = {} if export is None else {"iteration": export.iteration, "step": export.step}
        return {"now": now, "last": self._last}

    def heard(self, node: int, message: Mapping[str, Any], now: float) -> None:
        """A report of an agent. Raises LookupError, TypeError or ValueError for malformed ones."""
        export = self._export
        step = str(message["step"])
        if export is None or message["name"] != export.name or node not in export.awaited:
            return
        if step == "failed":
            is_late = message.get("code") == Code.TOO_LATE
            self._abandon(f"node {node}: {message['text']}", now, again=is_late)
        elif step == "taken" and export.step == "taking":
            for role, (generation, boundary) in message["roles"].items():
                export.said[int(role)] = Generation.from_list(generation), str(boundary)
            export.awaited.remove(node)
            if not export.awaited:
                self._begin_writing(export, now)
        elif step == "written" and export.step == "writing":
            export.awaited.remove(node)

    def tick(self, state: State, now: float) -> None:
        """Begin what is due, give up what cannot be finished, publish what is written."""
        self._interval.saw(state.reached)
        export, leaving = self._export, self._leaving
        is_late = leaving is not None and now > leaving.until
        if leaving is not None and is_late and (export is None or export.is_publishing):
            self._leave_by(leaving, now)  # whatever the disk waits for
        elif export is None and (leaving is None or leaving.removed):
            self._begin_if_due(state, now)
        elif export is not None and not export.is_publishing:
            self._look_after(export, state, is_late, now)

    def published(self, export: Export, state: State, error: str, now: float) -> None:
        """A written export counts, or why not (``error``). Older ones may be pruned next."""
        if error:
            self._abandon(f"it did not become valid: {error}", now)
            return
        assert export.generation is not None
        path, iteration = str(export.final), export.iteration
        self._last = {"iteration": iteration, "path": path, "error": ""}
        data = {"path": path, "background": True}
        lineage = export.generation.lineage
        self.effects.append(Event(Kind.DURABLE, lineage, iteration=iteration, data=data))
        self.effects.append(inputs.DurableValid(iteration, path, export.boundary))

    def keep(self, export: Export, state: State) -> int | None:
        """Return how many exports stay (0: all) when this one counts; None: nothing is to be
        pruned."""
        if export.purpose is Purpose.ASKED:
            return None
        # A recovery may just be loading an older one: the next export prunes, then.
        return self._settings.persist_keep if state.phase is Phase.RUNNING else 0

    def pruned(self, export: Export, error: str, now: float) -> None:
        """All is done for a published export; ``error``: why older ones were not removed."""
        if error:
            self._say("warning", f"old checkpoints are not removed: {error}", export.epoch)
        self._conclude(export, str(export.final), now)

    def removed(self, now: float) -> None:
        """Take note that what was left of an export is gone: the dump that waits for the room may
        begin."""
        if self._leaving is not None:  # else it was waited for long enough
            self._leave_by(self._leaving, now)

    def _look_after(self, export: Export, state: State, is_late: bool, now: float) -> None:
        lost = sorted(export.nodes - set(state.fleet.nodes))
        is_dumped = export.purpose is Purpose.DUMPED
        wanted = {Phase.DUMPING if is_dumped else Phase.RUNNING}
        if not is_dumped and (export.generation or export.iteration <= state.reached):
            wanted |= {Phase.ENDING, Phase.ENDED}  # which waits for it
        if state.phase in LAST_PHASES and state.phase not in wanted:
            self._abandon("the run is over", now)
        elif lost:
            self._abandon(f"node {lost[0]} was lost", now)
        elif now > export.limit:
            waits = ", ".join(map(str, sorted(export.awaited)))
            limit = self._settings.persist_seconds
            self._abandon(f"{export.step} took more than {limit:g} s on node {waits}", now)
        elif is_late:
            self._abandon("the rest of the time is needed for the dump", now)
        elif export.generation is None:
            if state.standing_epoch != export.epoch:
                self._abandon(f"epoch {export.epoch} was closed", now)
        elif not is_kept(state.line.kept, export.generation):
            # Rule 5: it belongs to a line of this run that was left.
            self._abandon("training has gone on from before it", now)
        elif export.step == "writing" and not export.awaited and state.phase in wanted:
            export.step = "publishing"
            self.effects.append(Publish(export, export.generation))

    def _begin_if_due(self, state: State, now: float) -> None:
        if state.phase in LAST_PHASES:
            self._unwish("the run is over")
        if self._dumped is not None and state.phase is Phase.DUMPING:
            self._begin_dump(self._dumped, now)
            return
        if state.phase is not Phase.RUNNING or state.record is None:
            if self._leaving is not None:
                self._leave_by(self._leaving, now)  # a recovery began before its last export did
            return
        # With a cadence there are generations of every n-th iteration only.
        epoch, every = state.record.epoch, state.record.protection.every
        if self._wish is not None:
            due = next_due(state.reached + self._margin, every)
            self._begin(state.record, due, self._wish, now)
            self._wish = None
        elif (iteration := self._interval.due(epoch, every, self._margin)) is not None:
            wish = Wish(self._directory, Purpose.INTERVAL)
            self._begin(state.record, iteration, wish, now)

    def _begin(self, record: EpochRecord, iteration: int, wish: Wish, now: float) -> None:
        nodes = frozenset(seat.node for seat in record.seats.values())
        self._export = self._new(iteration, record.epoch, wish, nodes, now)
        self._order(self._export, "export-take")

    def _begin_dump(self, order: ExportDump, now: float) -> None:
        restore, wish = order.restore, Wish(self._directory, Purpose.DUMPED)
        iteration, lineage = restore.generation.iteration, restore.generation.lineage
        export = self._new(iteration, lineage, wish, frozenset(order.roles.values()), now)
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

    def _new(
        self, iteration: int, epoch: int, wish: Wish, nodes: frozenset[int], now: float
    ) -> Export:
        self._count += 1
        return Export(
            run_id=self._run_id,
            name=f"{self._term}.{self._count}",
            epoch=epoch,
            iteration=iteration,
            directory=wish.directory,
            purpose=wish.purpose,
            number=wish.number,
            limit=now + self._settings.persist_seconds,
            awaited=set(nodes),
            nodes=nodes,
        )

    def _begin_writing(self, export: Export, now: float) -> None:
        generation = export.common_generation(self._world_size)
        if generation is None:
            moments = sorted({f"{one.iteration} after {m}" for one, m in export.said.values()})
            why = f"the roles have not set the same moment aside: {', '.join(moments)}"
            self._abandon(why, now)
            return
        self._margin = FIRST_MARGIN
        if export.directory == self._directory:
            self._interval.taken(export.iteration)
        export.generation = generation
        export.step = "writing"
        export.awaited = set(export.nodes)
        self._order(export, "export-write", directory=str(export.unfinished))

    def _abandon(self, why: str, now: float, *, again: bool = False) -> None:
        """Nothing of it is left; a later iteration is tried ``again``, if its own was overwritten
        before it was set aside."""
        export = self._export
        assert export is not None
        self._order(export, "export-drop")
        is_of_interval = export.purpose is Purpose.INTERVAL and self._leaving is None
        if again and self._margin < LONGEST_MARGIN:
            self._margin *= 2
            if not is_of_interval:  # else it is still due
                self._wish = self._wish or Wish(export.directory, export.purpose, export.number)
        else:
            self._margin = FIRST_MARGIN
            if is_of_interval and export.generation is None:
                self._interval.failed(export.epoch, export.iteration)
        self._last = {"iteration": export.iteration, "path": "", "error": why}
        text = f"no checkpoint of iteration {export.iteration} in the background: {why}"
        self._say("warning", text, export.epoch)
        is_last = self._wish is None and export.purpose is not Purpose.DUMPED
        is_awaited = self._leaving is not None and is_last
        self.effects.append(Remove(export.unfinished, is_awaited))
        if self._leaving is not None and is_last:
            # The dump may need the room that it has taken: it waits until that is removed.
            until = now + self._leaving.removal_seconds
            self._leaving = replace(self._leaving, until=until, removed=False)
            self._export = None
            self._answer(export, "")
        else:
            self._conclude(export, "", now)

    def _conclude(self, export: Export, path: str, now: float) -> None:
        """It is over; who waits for its end continues. ``path``: empty if it came to nothing."""
        self._export = None
        self._answer(export, path)
        if export.purpose is Purpose.DUMPED:
            assert export.generation is not None
            self.effects.append(inputs.DumpExported(export.generation, path))
        elif self._leaving is not None and self._wish is None:
            self._leave_by(self._leaving, now)

    def _leave_by(self, leaving: Leaving, now: float) -> None:
        self._leave(leaving.reason, max(0.0, leaving.ends - now), now)

    def _leave(self, reason: str, seconds: float | None, now: float) -> None:
        self._leaving = None
        self._unwish("the run ends")
        if self._export is not None and not self._export.is_publishing:
            self._abandon("the run ends", now)  # it must not write while the nodes dump
        self.effects.append(inputs.DumpRequested(reason, seconds))

    def _answer(self, export: Export, path: str) -> None:
        """Tell who has asked for it, unless it is tried again."""
        if export.number and (self._wish is None or self._wish.number != export.number):
            error = "" if path else self._last["error"]
            self.effects.append(inputs.Exported(export.number, export.iteration, path, error))

    def _unwish(self, why: str) -> None:
        """Drop what was to begin."""
        wish, self._wish = self._wish, None
        if wish is not None and wish.number:
            self.effects.append(inputs.Exported(wish.number, 0, "", why))

    def _say(self, level: str, text: str, epoch: int) -> None:
        self.effects.append(Event(Kind.LOG, epoch, data={"level": level, "text": text}))

    def _order(self, export: Export, kind: str, only: int | None = None, **content: Any) -> None:
        order = {"t": kind, "name": export.name, "iteration": export.iteration, **content}
        for node in sorted(export.nodes) if only is None else [only]:
            self.effects.append(Order(node, order))
