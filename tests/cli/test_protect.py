"""``deadpool protect``, and what status, report and progress say about the protection."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from immutables import Map

from deadpool_megatron import cli
from deadpool_megatron.cli.control import _rpo_line
from deadpool_megatron.cli.narration import describe_protection
from deadpool_megatron.cluster.coordinator.commands import Commands
from deadpool_megatron.cluster.coordinator.first_state import Estate, first_state
from deadpool_megatron.cluster.journal.entries import DirectoryJournal
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.roster import NodeState
from deadpool_megatron.cluster.machine.state import Config, State
from deadpool_megatron.cluster.run_directory.directory import RunInfo
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.layout.schemes import ProtectionPlan, uniform
from deadpool_megatron.recovery import plan
from deadpool_megatron.settings import Settings


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "nothing to change: give --scheme, --every or both"),
        (("--scheme", "buddy", "--group", "3"), "--group belongs to --scheme parity"),
        (("--every", "3"), "no-run is not a run directory"),
    ],
)
def test_bad_input(
    more: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["protect", str(tmp_path / "no-run"), *more]) == 2
    assert said in capsys.readouterr().err


class Desk:
    """The commands of a coordinator that has ``nodes`` connected; what it feeds its machine."""

    def __init__(self, nodes: int, settings: Settings, directory: Path) -> None:
        machine = Machine(Config(nodes, 0, 1, settings, "/dump"), plan)
        known = {n: NodeState("host", 1, f"node{n}") for n in range(nodes)}
        self.state: State = machine.start(0.0).changed({"nodes": Map(known)})
        self.fed: list[inputs.Input] = []
        self.commands = Commands.__new__(Commands)
        self.commands._info = RunInfo.__new__(RunInfo)
        object.__setattr__(self.commands._info, "settings", settings)
        self.commands._state = lambda: self.state
        self.commands._feed = self.fed.append
        self.commands._journal = self.journal = DirectoryJournal(directory)

    def ask(self, **wish: object) -> dict[str, object]:
        return asyncio.run(self.commands.answer({"command": "protect", **wish}))


def test_what_is_not_named_stays(tmp_path: Path) -> None:
    desk = Desk(4, Settings(cadence="3"), tmp_path)
    assert desk.ask(scheme="parity", group=2) == {
        "ok": True,
        "plan": "parity(2); every 3 iterations",
    }
    assert desk.ask(every=5)["plan"] == "buddy; every 5 iterations"
    plans = [item.plan for item in desk.fed if isinstance(item, inputs.ProtectionRequested)]
    assert [(one.rules[0].scheme.group, one.every) for one in plans] == [(2, 3), (0, 5)]


@pytest.mark.parametrize(("records", "is_kept"), [(1, True), (2, False)])
def test_the_next_coordinator_knows_what_was_asked_for(
    records: int, is_kept: bool, tmp_path: Path
) -> None:
    """Unless an epoch has come since then: it has the plan, or a later one."""
    desk = Desk(4, Settings(), tmp_path)
    desk.state = desk.state.changed({"epoch": 1})
    assert desk.ask(every=5)["ok"]
    for epoch in range(1, records + 1):
        restore = Restore("initial", Generation(0, 0))
        record = EpochRecord(epoch, {0: Seat(0, 0, 0)}, {}, restore, "store", 1)
        desk.journal.write("epoch", epoch, record.to_dict())
    machine = Machine(Config(4, 0, 1, Settings(), "/dump"), plan)
    state = first_state(machine, DirectoryJournal(tmp_path), Estate(), 0.0)
    assert state.protection.every == (5 if is_kept else 1)
    assert bool(state.protection_why) == is_kept


def taken_over(desk: Desk, tmp_path: Path, *, begins_anew: bool = False) -> State:
    """What the next coordinator begins with, after one record."""
    restore = Restore("initial", Generation(0, 0))
    record = EpochRecord(1, {0: Seat(0, 0, 0)}, {}, restore, "store", 1)
    desk.journal.write("epoch", 1, record.to_dict())
    config = Config(4, 0, 1, desk.commands._info.settings, "/dump", begins_anew=begins_anew)
    return first_state(Machine(config, plan), DirectoryJournal(tmp_path), Estate(), 0.0)


def test_a_run_that_is_started_again_has_the_protection_of_its_command(tmp_path: Path) -> None:
    """Also its coordinators after the first one."""
    desk = Desk(4, Settings(), tmp_path)
    desk.state = desk.state.changed({"epoch": 1})
    assert desk.ask(scheme="parity", group=2)["ok"]
    asked = uniform("parity", Settings(), 1, 2)
    assert taken_over(desk, tmp_path).protection == asked
    assert taken_over(desk, tmp_path, begins_anew=True).protection == ProtectionPlan()
    assert taken_over(desk, tmp_path).protection == ProtectionPlan()


def test_refused_at_once_with_the_reason(tmp_path: Path) -> None:
    desk = Desk(2, Settings(), tmp_path)
    assert "attach 1 more" in str(desk.ask(scheme="parity")["error"])
    assert "start the run with" in str(desk.ask(scheme="recompute")["error"])
    assert "not between 1 and 1000" in str(desk.ask(every=0)["error"])
    assert "by buddy already" in str(desk.ask(every=1)["error"])
    assert desk.fed == []
    with pytest.raises(ValueError, match="no-such"):
        desk.ask(scheme="no-such")


def test_lines_for_people() -> None:
    known = {
        "plan": "buddy; every 3 iterations",
        "wanted": "",
        "survives": 1,
        "most_lost": 5,
        "most_lost_seconds": 40.6,
    }
    assert _rpo_line(known) == "  RPO: at most 5 iterations, about 40.6 s"
    later = {**known, "wanted": "parity(4)", "most_lost_seconds": None}
    assert _rpo_line(later) == "  RPO: at most 5 iterations; becomes parity(4)"
    data = {"old": "buddy", "new": "buddy; every 3 iterations", "why": "asked for", "most_lost": 5}
    change = Event(Kind.PROTECTION, 2, data=data)
    assert describe_protection(change) == (
        "buddy; every 3 iterations from epoch 2 on (asked for); RPO: at most 5 iterations"
    )
