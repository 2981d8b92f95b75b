"""The life of saves and exports: orders, inputs of the machine, events and files; see lives/."""

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator import checkpoints, new_checkpoint
from deadpool_megatron.cluster.machine import actions
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.layout.records import Restore
from tests.common import lives
from tests.persist.harness.world import World

PATH = Path(__file__).parent / "lives" / "checkpoints.txt"


class Life:
    """A run that happens by the lines of a script."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.lines: list[str] = []
        self._directory, self._now = directory, 1000.0
        self._place, self._shown = Path(), Any
        patch.setattr(checkpoints.time, "monotonic", lambda: self._now)
        for module in (checkpoints, new_checkpoint):
            patch.setattr(module.secrets, "token_hex", lambda _: "t")
        self._world = World(directory / "run", **settings)
        self._world.run.path.mkdir()
        (self._world.run.path / "run.json").write_text('{"run_id": "id"}')

    def do(self, command: str, value: Any) -> None:
        world, state = self._world, self._world.state
        match command:
            case "wait":
                self._now += value
            case "tick":
                for _ in range(value):
                    world.exports.tick()
            case "train":
                for newest in range(state.reached + 1, value + 1):
                    state.reached = newest
                    world.exports.tick()
            case "every":
                state.record.protection.every = value
            case "successor":
                world.exports = world.takes_over()
            case "work":
                world.work()
            case "says":
                world.report(value[0], value[1], **value[2])
            case "taken":
                world.taken(value)
            case "written":
                self._place.mkdir(parents=True)
                (self._place / ".metadata").write_text(f"of {self._place.name}")
                for node in (0, 1):
                    world.report(node, "written")
            case "reached":
                state.reached = value
            case "phase":
                state.phase, state.standing_epoch = Phase(value[0]), value[1]
            case "epoch":
                state.record.epoch = value[0]
                state.lineage.kept = {int(lineage): last for lineage, last in value[1].items()}
            case "lose":
                del state.fleet.nodes[value]
            case "struck":
                state.lineage.invalidated = frozenset(value)
            case "export":
                world.exports.carry_out(actions.BeginExport(*value))
            case "end":
                world.exports.carry_out(actions.EndRun(*value))
            case "dump":
                roles = {int(role): node for role, node in value["roles"].items()}
                restore = Restore.from_dict(value["restore"])
                world.exports.carry_out(actions.ExportDump(restore, roles))
            case "save":
                asyncio.run(world.exports.save(value))
            case "saves":

                async def save_twice() -> None:
                    await asyncio.gather(*(world.exports.save(value) for _ in range(2)))

                asyncio.run(save_twice())
            case "write":
                path = Path(value[0])
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(value[1])
            case "disk":
                for path in sorted(self._directory.rglob("*")):
                    text = "/" if path.is_dir() else f": {path.read_text().split()}"
                    self.lines.append(f"    {path.relative_to(self._directory)}{text}")
                loaded, is_used = sorted(world.exports.loaded), world.exports.is_used
                self.lines.append(f"    loaded: {loaded}, used: {is_used}")

    def show(self) -> None:
        """Note the effects of a line."""
        world = self._world
        for _, _, message in world.sent:
            self._place = Path(message.get("directory", self._place))
        found = [f"to {node}: {json.dumps(message)}" for node, _, message in world.sent]
        found += [f"told the machine: {item}" for item in world.fed]
        found += [
            f"event: {event.kind} {event.epoch} {event.iteration} {event.data}"
            for event in world.events
        ]
        found += [f"warning: {text}" for text in world.warnings]
        found += [f"to all: iteration {iteration} is valid" for iteration in world.done]
        shown = (world.exports.status(), world.exports.pending(), len(world.tasks))
        if found or shown != self._shown:
            found.append(f"status: {shown[0]}, under way: {shown[1]}, tasks: {shown[2]}")
        self._shown = shown
        self.lines += [f"    {line}" for line in found]
        for seen in (world.sent, world.fed, world.events, world.warnings, world.done):
            seen.clear()

    def live(self, script: Sequence[str]) -> list[str]:
        for line in script:
            self.lines.append(line)
            command, _, value = line.replace("DIR", str(self._directory)).partition(": ")
            self.do(command, json.loads(value or "1"))
            self.show()
        for task in self._world.tasks:
            task.close()
        text = "\n".join(self.lines).replace(str(self._directory), "DIR")
        digests = list(dict.fromkeys(re.findall("[0-9a-f]{64}", text)))
        return re.sub("[0-9a-f]{64}", lambda m: f"DIGEST{digests.index(m[0])}", text).split("\n")


def live(script: Sequence[str], options: dict[str, Any], directory: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        given = json.loads(json.dumps(options).replace("DIR", str(directory)))
        return Life(directory, patch, **given).live(script)


def test_a_life_is_as_it_was_before(tmp_path):
    lives.compare(PATH, live, tmp_path)
