"""The last export of a run that has to end: never at the cost of its dump."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.actions import BeginExport, EndRun, ExportDump
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.cluster.run_directory.directory import read_json
from deadpool_megatron.layout.records import Generation, Restore
from tests.persist.harness.world import DROP, TAKE, World, lose_a_node, no_room

WHY = "the time is over"
DUMP = inputs.DumpRequested(WHY)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Of a run that has 100 seconds left, and orders its last export."""
    made = World(tmp_path, persist_directory=str(tmp_path / "exports"))
    made.exports.carry_out(EndRun(WHY, 100.0))
    assert not made.fed, "training goes on"
    made.exports.tick()
    return made


def told(world: World) -> list[object]:
    """What the machine was fed, whatever time it was given."""
    return [
        replace(one, seconds=None) if isinstance(one, inputs.DumpRequested) else one
        for one in world.fed
    ]


def test_a_last_export_and_then_the_dump(world: World, tmp_path: Path) -> None:
    assert world.orders() == TAKE
    assert "within 100 s; a last checkpoint is written in the background" in world.complaint()
    world.exports.carry_out(BeginExport(5, str(tmp_path)))
    why = "the run is about to end, and writes its own last export"
    assert world.fed == [inputs.Exported(5, 0, "", why)]
    world.fed.clear()
    path = world.finish(2)
    assert told(world) == [inputs.DurableValid(2, str(path)), DUMP]
    assert path.is_dir()
    dump = world.fed[-1]
    assert dump.seconds is not None
    assert 0 < dump.seconds <= 100, "what the export has left of it"
    world.orders()
    world.exports.tick()
    assert world.orders() == [], "there is one last export"


@pytest.mark.parametrize(
    ("settings", "phase", "seconds"),
    [
        ({"persist_interval": 4}, Phase.RUNNING, None),
        ({"persist_interval": 4}, Phase.OPENING, 100.0),
        ({}, Phase.RUNNING, 100.0),
    ],
)
def test_without_time_or_a_place_or_in_a_recovery_the_dump_comes_at_once(
    tmp_path: Path, settings: dict[str, int], phase: Phase, seconds: float | None
) -> None:
    world = World(tmp_path, **settings)
    world.state.phase = phase
    world.exports.carry_out(EndRun(WHY, seconds))
    assert told(world) == [DUMP]
    assert world.orders() == []


def too_little_time(world: World) -> None:
    world.exports.carry_out(EndRun(WHY, 0.0))


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (lose_a_node, "node 1 was lost"),
        (no_room, "no room"),
        (too_little_time, "the rest of the time is needed for the dump"),
    ],
)
def test_an_export_that_comes_to_nothing_costs_no_dump(
    world: World, happens: Callable[[World], None], said: str
) -> None:
    world.orders()
    happens(world)
    world.exports.tick()
    assert said in world.complaint()
    assert world.orders()[:2] == DROP
    world.work()
    assert told(world) == [DUMP]


def test_the_dump_has_the_room_of_an_export_that_came_to_nothing(world: World) -> None:
    world.taken(2)
    (place,) = {Path(m["directory"]) for _, t, m in world.sent if t == "export-write"}
    place.mkdir(parents=True)
    (place / "__0_0.distcp").touch()
    no_room(world)
    world.orders()
    world.exports.tick()
    assert told(world) == [], "what was written is still there"
    assert world.orders() == [], "and nothing else is begun"
    world.work()
    assert not place.exists()
    assert told(world) == [DUMP]
    world.exports.tick()
    assert told(world) == [DUMP]


def test_the_dump_does_not_wait_for_ever_for_the_room(world: World) -> None:
    world.orders()
    no_room(world)
    world.exports.carry_out(EndRun(WHY, 0.0))
    world.exports.tick()
    assert told(world) == [DUMP], "a disk that does not answer"
    world.work()
    assert told(world) == [DUMP]


def test_an_export_of_the_interval_that_is_under_way_is_the_last_one(tmp_path: Path) -> None:
    world = World(tmp_path, persist_interval=4)
    world.exports.tick()
    world.orders()
    world.exports.carry_out(EndRun(WHY, 100.0))
    world.exports.tick()
    assert world.orders() == []
    path = str(world.finish(4))
    assert told(world) == [inputs.DurableValid(4, path), DUMP]


def test_who_asked_before_a_failure_ended_the_run_is_answered(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.state.phase = Phase.CLOSING
    world.exports.carry_out(BeginExport(5, str(tmp_path)))
    world.exports.tick()
    assert world.fed == [], "a recovery goes by"
    world.state.phase = Phase.DUMPING
    world.exports.tick()
    assert world.fed == [inputs.Exported(5, 0, "", "the run is over")]


G7 = Generation(1, 7)
DUMPED = ExportDump(Restore("dump", G7, "step", "/dump/1-7"), {0: 0, 1: 0})


def dumping(directory: Path) -> World:
    """Node 0 has dumped both roles; node 1 is lost."""
    world = World(directory, persist_interval=40)
    world.state.reached = 38
    world.exports.tick()
    assert world.orders() == TAKE
    del world.state.fleet.nodes[1]
    world.state.phase, world.state.standing_epoch = Phase.DUMPING, None
    world.exports.carry_out(DUMPED)
    assert world.orders() == DROP, "of the interval"
    world.work()
    world.exports.tick()
    return world


def test_what_was_dumped_becomes_a_checkpoint(tmp_path: Path) -> None:
    world = dumping(tmp_path)
    found = Restore.from_dict(read_json(world.run.latest))
    assert found == DUMPED.restore, "it counts before it is a checkpoint"
    ((node, kind, message),) = world.sent
    assert (node, kind, message["iteration"]) == (0, "export-dump", 7)
    assert message["dump"] == {
        "path": "/dump/1-7",
        "generation": [1, 7],
        "boundary": "step",
        "roles": [0, 1],
    }
    place = Path(message["directory"])
    place.mkdir(parents=True)
    world.hear(0, "written")
    world.exports.tick()
    world.work()
    path = str(tmp_path / "exports" / "iter_0000007")
    assert told(world) == [inputs.DurableValid(7, path, "step"), inputs.DumpExported(G7, path)]
    assert Path(path).is_dir()


def forget_the_other_node(world: World) -> None:
    world.state.fleet.nodes.clear()


def no_bytes(world: World) -> None:
    world.hear(0, "failed", text="part main of role 1 does not lie there as bytes")


def end(world: World) -> None:
    world.state.phase = Phase.ENDING


@pytest.mark.parametrize("happens", [forget_the_other_node, no_bytes, end])
def test_a_dump_that_cannot_become_a_checkpoint_is_answered(
    tmp_path: Path, happens: Callable[[World], None]
) -> None:
    world = dumping(tmp_path)
    happens(world)
    world.exports.tick()
    world.exports.tick()
    assert told(world) == [inputs.DumpExported(G7, "")]
    world.work()


def test_a_checkpoint_that_is_being_published_is_not_disturbed(tmp_path: Path) -> None:
    world = World(tmp_path, persist_interval=4)
    world.exports.tick()
    world.taken(4)
    world.written()
    world.exports.tick()
    world.state.phase = Phase.DUMPING
    world.orders()
    world.exports.carry_out(DUMPED)
    world.exports.tick()
    assert world.orders() == []
    world.work()
    assert told(world) == [inputs.DurableValid(4, str(tmp_path / "exports" / "iter_0000004"))]
    world.exports.tick()
    assert world.orders() == [(0, "export-dump")]
