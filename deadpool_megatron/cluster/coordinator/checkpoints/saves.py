"""Saves: the roles have written a checkpoint and ask the coordinator for it to count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cluster.coordinator.checkpoints.durable import DurableError, make_valid
from deadpool_megatron.cluster.coordinator.options import Desk
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.state.phases import Phase
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import Generation, Restore


class Saves:
    """``done(iteration)`` tells the writers. For the coordinator's loop."""

    def __init__(
        self, desk: Desk, refused: Callable[[str, str], None], done: Callable[[int], None]
    ) -> None:
        self._run = desk.options.run
        self._run_id = desk.options.info.run_id
        self._beat_seconds = desk.options.info.settings.beat_interval_seconds
        self._desk = desk
        self._refused = refused
        self._done = done
        self._under_way: set[tuple[int, int]] = set()

    def under_way(self) -> list[str]:
        """Return what is being made valid, in words."""
        return [f"the checkpoint of iteration {one}" for _, one in sorted(self._under_way)]

    async def handle(self, m: Mapping[str, Any]) -> None:
        """All files are written: make the checkpoint valid, if its epoch is still the open one.
        After a takeover it is asked again, by agents that have heard of no end.
        """
        which = int(m["epoch"]), int(m["iteration"])
        if which not in self._under_way:
            self._under_way.add(which)
            try:
                await self._make_valid(m, *which)
            finally:
                self._under_way.remove(which)

    async def _make_valid(self, m: Mapping[str, Any], epoch: int, iteration: int) -> None:
        while self._desk.state().phase is Phase.GATHERING:
            # After a takeover it is not known yet whether the epoch stays open; that phase ends.
            await asyncio.sleep(self._beat_seconds)
        if epoch != self._desk.state().standing_epoch:
            self._refused("durable-request", f"of epoch {epoch}, which is not open")
            return
        failpoints.hit("coordinator.durable", epoch=epoch, iteration=iteration)
        final = Path(str(m["final"]))
        restore = Restore("durable", Generation(epoch, iteration), "save", str(final))
        loop = asyncio.get_running_loop()
        place = (Path(str(m["temporary"])), final, restore, self._run, self._run_id)

        def counts() -> bool:
            # A failure may have ended the epoch while the files were synced.
            return self._desk.state().standing_epoch == epoch

        struck = self._desk.state().line.struck
        try:
            await loop.run_in_executor(None, make_valid, *place, counts, struck)
        except DurableError as error:
            text = f"checkpoint of iteration {iteration} did not become valid: {error}"
            self._desk.emit(Event(Kind.LOG, epoch, data={"level": "error", "text": text}))
            return
        data = {"path": str(final)}
        self._desk.emit(Event(Kind.DURABLE, epoch, iteration=iteration, data=data))
        self._desk.feed(inputs.DurableValid(iteration, str(final)))
        self._done(iteration)
