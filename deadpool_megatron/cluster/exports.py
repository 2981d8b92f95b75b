"""Exports, as the coordinator sees them: which generation, who has done what, when one counts.

An export goes through three steps: *taking* (every vault with a role sets the generation aside, and
says so once it is committed), *writing* (one exporter on each of these nodes; the one with role 0
makes a checkpoint of all files), *publishing* (rename, pointers, pruning). Any failure on the way
ends it, and the next one is tried when it is due; neither training nor a recovery waits for one.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster import machine_events as inputs
from deadpool_megatron.cluster.coordinator_options import CoordinatorOptions
from deadpool_megatron.cluster.durable import (
    DurableError,
    publish_export,
    remember_and_prune,
    unfinished_export,
)
from deadpool_megatron.cluster.machine_state import LAST_PHASES, Phase, State
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.cadence import next_due
from deadpool_megatron.layout.decision import is_kept
from deadpool_megatron.layout.records import Generation, Restore

# Iterations between an order and the one it is about; more where iterations are too fast for that.
_FIRST_MARGIN = 2
_LONGEST_MARGIN = 64


@dataclass
class Export:
    """One that is under way; ``on_demand``: somebody asked for it."""

    run_id: str
    name: str
    epoch: int
    iteration: int
    directory: Path
    on_demand: bool
    limit: float
    awaited: set[int]
    nodes: frozenset[int]
    step: str = "taking"
    generation: Generation | None = None
    said: dict[int, tuple[Generation, str]] = field(default_factory=dict)

    @property
    def unfinished(self) -> Path:
        """Where it is written."""
        return unfinished_export(self.directory, self.run_id, self.name)

    @property
    def final(self) -> Path:
        """Where it will be."""
        return self.directory / f"iter_{self.iteration:07d}"

    def common_generation(self, world_size: int) -> Generation | None:
        """What all roles have set aside, when it is the same moment for all of them."""
        found = set(self.said.values())
        if len(self.said) != world_size or len(found) != 1:
            return None
        return found.pop()[0]


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
        self._wish: Path | None = None
        self._margin = _FIRST_MARGIN
        self._export: Export | None = None
        self._last: dict[str, Any] = {}

    def request(self, directory: str) -> dict[str, Any]:
        """Answer ``deadpool persist``; an empty directory means the usual one."""
        state = self._state()
        if self._wish is not None or (self._export is not None and self._export.on_demand):
            return {"ok": False, "error": "an export that was asked for is still under way"}
        if state.phase is not Phase.RUNNING:
            return {"ok": False, "error": f"the run is {state.phase}: ask again when it trains"}
        if directory and not Path(directory).is_absolute():
            return {"ok": False, "error": f"{directory} is no absolute path"}
        self._wish = Path(directory) if directory else self._directory
        self._margin = _FIRST_MARGIN
        return {"ok": True, "directory": str(self._wish)}

    def status(self) -> dict[str, Any]:
        """For people: ``now`` (what is under way), ``last`` (how the last one ended)."""
        export = self._export
        now = {} if export is None else {"iteration": export.iteration, "step": export.step}
        asked = self._wish is not None or (export is not None and export.on_demand)
        return {"now": now, "last": self._last, "asked": asked}

    def heard(self, node: int, message: Mapping[str, Any]) -> None:
        """A report of an agent. Raises LookupError, TypeError or ValueError for malformed ones."""
        export = self._export
        step = str(message["step"])
        if export is None or message["name"] != export.name or node not in export.awaited:
            return
        if step == "failed":
            self._abandon(f"node {node}: {message['text']}")
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
        if export is None:
            self._begin_if_due(state)
            return
        if export.step == "publishing":
            return
        lost = sorted(export.nodes - set(state.nodes))
        if state.phase in LAST_PHASES:
            self._abandon("the run is over")
        elif lost:
            self._abandon(f"node {lost[0]} was lost")
        elif time.monotonic() > export.limit:
            waits = ", ".join(map(str, sorted(export.awaited)))
            limit = self._settings.persist_seconds
            self._abandon(f"{export.step} took more than {limit:g} s on node {waits}")
        elif export.generation is None:
            if state.open_epoch != export.epoch:
                self._abandon(f"epoch {export.epoch} was closed")
        elif not is_kept(state.kept, export.generation):
            # Rule 5: it belongs to a line of this run that was left.
            self._abandon("training has gone on from before it")
        elif export.step == "writing" and not export.awaited and state.phase is Phase.RUNNING:
            export.step = "publishing"
            self._spawn(self._publish(export, export.generation))

    @property
    def _directory(self) -> Path:
        named = self._settings.persist_directory
        return Path(named) if named else self._run.exports

    def _begin_if_due(self, state: State) -> None:
        interval = self._settings.persist_interval
        if state.phase is not Phase.RUNNING or state.record is None:
            return
        newest = max(state.newest, state.record.restore.generation.iteration)
        # With a cadence there are generations of every n-th iteration only.
        every = state.record.protection.every
        if self._wish is not None:
            due = next_due(newest + self._margin, every)
            self._begin(state, due, self._wish, on_demand=True)
            self._wish = None
        elif interval:
            due = next_due(next_due(newest + _FIRST_MARGIN, interval), every)
            if due > self._tried:
                self._begin(state, due, self._directory, on_demand=False)

    def _begin(self, state: State, iteration: int, directory: Path, *, on_demand: bool) -> None:
        assert state.record is not None
        self._count += 1
        self._tried = iteration
        nodes = frozenset(seat.node for seat in state.record.seats.values())
        export = Export(
            run_id=self._run_id,
            name=f"{self._term}.{self._count}",
            epoch=state.record.epoch,
            iteration=iteration,
            directory=directory,
            on_demand=on_demand,
            limit=time.monotonic() + self._settings.persist_seconds,
            awaited=set(nodes),
            nodes=nodes,
        )
        self._export = export
        self._order(export, "export-take")

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
        # After everything that belongs to the iteration: its evaluation was done, too.
        restore = Restore("durable", generation, "save", str(export.final))
        place = (export.unfinished, export.final, restore, self._run, self._run_id)

        def counts() -> bool:
            # A recovery may have decided while the files were synced.
            return is_kept(self._state().kept, generation)

        try:
            await loop.run_in_executor(None, publish_export, *place, counts)
        except DurableError as error:
            self._abandon(f"it did not become valid: {error}")
            return
        path = str(export.final)
        self._last = {"iteration": export.iteration, "path": path, "error": ""}
        data = {"path": path, "background": True}
        self._emit(Event(Kind.DURABLE, generation.lineage, iteration=export.iteration, data=data))
        durable = self._state().durable
        # The run itself may have saved a later iteration meanwhile.
        if durable is None or durable.generation.iteration < export.iteration:
            self._feed(inputs.DurableValid(export.iteration, path))
        if not export.on_demand:
            await self._prune(export)
        self._export = None

    async def _prune(self, export: Export) -> None:
        state = self._state()
        needed = {state.durable.path} if state.durable is not None else set[str]()
        # A recovery may just be loading an older one: the next export prunes, then.
        keep = self._settings.persist_keep if state.phase is Phase.RUNNING else 0
        what = (self._run, self._run_id, export.final, keep, needed)
        try:
            await asyncio.get_running_loop().run_in_executor(None, remember_and_prune, *what)
        except DurableError as error:
            data = {"level": "warning", "text": f"old checkpoints are not removed: {error}"}
            self._emit(Event(Kind.LOG, export.epoch, data=data))

    def _abandon(self, why: str) -> None:
        """Nothing of it is left; somebody who asked gets another try if it was too late."""
        export = self._export
        assert export is not None
        self._export = None
        self._order(export, "export-drop")
        again = export.on_demand and "too late" in why and self._margin < _LONGEST_MARGIN
        if again:
            self._margin *= 2
            self._wish = export.directory
        text = f"no checkpoint of iteration {export.iteration} in the background: {why}"
        self._last = {"iteration": export.iteration, "path": "", "error": why}
        self._emit(Event(Kind.LOG, export.epoch, data={"level": "warning", "text": text}))
        self._spawn(_remove(export.unfinished))

    def _order(self, export: Export, kind: str, **content: Any) -> None:
        order = {"t": kind, "name": export.name, "iteration": export.iteration, **content}
        for node in sorted(export.nodes):
            self._send(node, order)


async def _remove(directory: Path) -> None:
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, lambda: shutil.rmtree(directory, ignore_errors=True))
