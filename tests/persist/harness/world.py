"""A made-up run for the coordinator's part of exports: what it orders, says and hears."""

import asyncio
from collections.abc import Coroutine, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deadpool_megatron.cluster.coordinator.checkpoints import Checkpoints
from deadpool_megatron.cluster.coordinator.succession import RecoveredState
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import Generation, Restore, Seat
from deadpool_megatron.settings import Settings


class World:
    """Two nodes of one role each, in epoch 1, and everything that :class:`Checkpoints` ask for."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        settings |= {
            name: str(settings[name]) for name in ("persist_interval",) if name in settings
        }
        self.run = RunDirectory(directory)
        seats = {role: Seat(role, 0, 0) for role in range(2)}
        start, plan = Restore("initial", Generation(1, 0)), SimpleNamespace(every=1)
        record = SimpleNamespace(epoch=1, seats=seats, restore=start, protection=plan)
        self.state: Any = SimpleNamespace(
            phase=Phase.RUNNING,
            record=record,
            standing_epoch=1,
            fleet=SimpleNamespace(nodes={0: None, 1: None}),
            lineage=SimpleNamespace(kept={1: 1 << 62}, valid=(), struck=frozenset()),
            reached=0,
        )
        self.sent: list[tuple[int, str, Mapping[str, Any]]] = []
        self.events: list[Event] = []
        self.warnings: list[str] = []
        self.fed: list[Any] = []
        self.tasks: list[Coroutine[Any, Any, object]] = []
        info = SimpleNamespace(settings=Settings(**settings), world_size=2, run_id="id")
        self._options: Any = SimpleNamespace(
            run=self.run, info=info, term=SimpleNamespace(number=1), recovered=RecoveredState()
        )
        self.done: list[int] = []
        self.exports = self.takes_over()

    def recovered(self, found: RecoveredState) -> None:
        """What the next coordinator has read before."""
        self._options.recovered = found

    def takes_over(self) -> Checkpoints:
        """The part of another coordinator."""
        one: Any = SimpleNamespace(
            options=self._options,
            state=self.state,
            feed=self.fed.append,
            warn=self.warnings.append,
            spawn=self.tasks.append,
            files=SimpleNamespace(write=self.events.append),
            peers=SimpleNamespace(
                refuse=lambda what, why: None,
                order=self._send,
                send_all=lambda message: self.done.append(message["iteration"]),
            ),
        )
        return Checkpoints(one)

    def _send(self, node: int, message: Mapping[str, Any]) -> None:
        self.sent.append((node, message["t"], message))

    def orders(self) -> list[tuple[int, str]]:
        """What was sent since the last look."""
        found = [(node, kind) for node, kind, _ in self.sent]
        self.sent.clear()
        return found

    def hear(self, node: int, step: str, **facts: Any) -> None:
        """An agent speaks about the export under way."""
        name = f"{self.exports._term}.{self.exports._count}"
        self.exports.heard(node, {"t": "export", "name": name, "step": step, **facts})

    def taken(self, iteration: int, boundary: str = "step") -> None:
        """Both nodes have set it aside."""
        for node in range(2):
            held = [self.state.record.epoch, iteration]
            self.hear(node, "taken", roles={str(node): [held, boundary]})

    def written(self) -> Path:
        """Both nodes have written; answers where."""
        orders = ("export-write", "export-dump")
        place = next(Path(m["directory"]) for _, t, m in self.sent if t in orders)
        place.mkdir(parents=True)
        (place / ".metadata").touch()
        for node in range(2):
            self.hear(node, "written")
        return place

    def finish(self, iteration: int) -> Path:
        """The export under way comes to its end; answers where it is."""
        self.taken(iteration)
        self.written()
        self.sent.clear()
        self.exports.tick()
        self.work()
        return self.run.exports / f"iter_{iteration:07d}"

    def work(self) -> None:
        """Carry out what was spawned."""
        tasks = self.tasks.copy()
        self.tasks.clear()
        for task in tasks:
            asyncio.run(task)

    def complaint(self) -> str:
        """The last line about an export that came to nothing."""
        lines = [str(e.data["text"]) for e in self.events if e.kind is Kind.LOG]
        lines += self.warnings
        return lines[-1] if lines else ""


def lose_a_node(world: World) -> None:
    del world.state.fleet.nodes[1]


def no_room(world: World) -> None:
    world.hear(1, "failed", text="no room")


def overwritten(world: World) -> None:
    world.hear(0, "failed", text="the slot was overwritten", code="too-late")


TAKE, WRITE, DROP = (
    [(0, f"export-{kind}"), (1, f"export-{kind}")] for kind in ("take", "write", "drop")
)
