"""A run without processes for the coordinator's part of exports: its orders and reports."""

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deadpool_megatron.cluster.coordinator.checkpoints import Checkpoints
from deadpool_megatron.cluster.coordinator.succession import RecoveredState, valid_checkpoints
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event
from deadpool_megatron.layout.records import Generation, Restore, Seat
from deadpool_megatron.settings import Settings


class World:
    """Two nodes of one role each, in epoch 1, and everything that :class:`Checkpoints` ask for."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        if "persist_interval" in settings:
            settings["persist_interval"] = str(settings["persist_interval"])
        self.run = RunDirectory(directory)
        seats = {role: Seat(role, 0, 0) for role in range(2)}
        start, plan = Restore("initial", Generation(1, 0)), SimpleNamespace(every=1)
        record = SimpleNamespace(epoch=1, seats=seats, restore=start, protection=plan)
        self.state: Any = SimpleNamespace(
            phase=Phase.RUNNING,
            seats=seats,
            record=record,
            standing_epoch=1,
            fleet=SimpleNamespace(nodes={0: None, 1: None}),
            lineage=SimpleNamespace(kept={1: 1 << 62}, valid=(), invalidated=frozenset()),
            reached=0,
        )
        self.sent: list[tuple[int, str, Mapping[str, Any]]] = []
        self.events: list[Event] = []
        self.warnings: list[str] = []
        self.fed: list[Any] = []
        self.tasks: list[Coroutine[Any, Any, object]] = []
        info = SimpleNamespace(settings=Settings(**settings), run_id="id", world_size=0)
        self._options: Any = SimpleNamespace(
            run=self.run, info=info, term=SimpleNamespace(number=1), recovered=RecoveredState()
        )
        self.done: list[int] = []
        self.exports = self.takes_over()

    def takes_over(self) -> Checkpoints:
        """Return the exports of a new coordinator, which has read the valid checkpoints."""
        self._options.recovered = RecoveredState(valid=valid_checkpoints(self.run))
        service: Any = SimpleNamespace(
            options=self._options,
            state=self.state,
            feed=self.fed.append,
            warn=self.warnings.append,
            spawn=self.tasks.append,
            files=SimpleNamespace(write=self.events.append),
            peers=SimpleNamespace(
                refuse=lambda peer, reason: None,
                order=self._send,
                send_all=lambda message: self.done.append(message["iteration"]),
            ),
        )
        return Checkpoints(service)

    def _send(self, node: int, message: Mapping[str, Any]) -> None:
        self.sent.append((node, message["t"], message))

    def report(self, node: int, step: str, **facts: Any) -> None:
        """Receive an agent's report about the current export."""
        name = f"{self.exports._prefix}.{self.exports._export_count}"
        self.exports.take_report(node, {"t": "export", "name": name, "step": step, **facts})

    def taken(self, iteration: int, boundary: str = "step") -> None:
        """Both nodes have pinned it."""
        for node in range(2):
            held = [self.state.record.epoch, iteration]
            self.report(node, "taken", roles={str(node): [held, boundary]})

    def work(self) -> None:
        """Run the spawned tasks."""
        tasks = self.tasks.copy()
        self.tasks.clear()
        for task in tasks:
            asyncio.run(task)
