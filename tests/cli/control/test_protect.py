"""``deadpool protect``, and what status, report and progress say about the protection."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deadpool_megatron.cluster.coordinator.commands import Commands
from deadpool_megatron.cluster.journal.user_requests import Verb
from deadpool_megatron.cluster.machine.machine import Machine
from deadpool_megatron.cluster.machine.state import Config, NodeState
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.layout.schemes import ProtectionPlan
from deadpool_megatron.settings import Settings


class Desk:
    """The commands of a coordinator that has ``nodes`` connected."""

    def __init__(self, nodes: int, settings: Settings) -> None:
        self.state = Machine(Config(nodes, 0, 1, settings, "/dump"), 0.0).state
        self.state.fleet.nodes = {n: NodeState("host", 1, f"node{n}") for n in range(nodes)}
        options = {"info": SimpleNamespace(settings=settings), "run": RunDirectory(Path("/run"))}
        term = SimpleNamespace(number=1)
        self.options = SimpleNamespace(**options, journal=None, term=term, restarted=False)
        self.commands = Commands(cast(Any, self), dict)

    def ask(self, **wish: object) -> dict[str, Any] | str:
        return self.commands._what(Verb.PROTECT, wish)


def test_what_is_not_named_stays():
    desk = Desk(4, Settings(cadence="3"))
    found = desk.ask(scheme="parity", group=2)
    assert isinstance(found, dict)
    assert found["words"] == "parity(2); every 3 iterations"
    wanted = ProtectionPlan.from_dict(found["plan"])
    assert (wanted.scheme.group, wanted.every) == (2, 3)
    found = desk.ask(every=5)
    assert isinstance(found, dict)
    assert found["words"] == "buddy; every 5 iterations"


def test_refused_at_once_with_the_reason():
    desk = Desk(2, Settings())
    assert "1 more" in str(desk.ask(scheme="parity"))
    assert "start the run with" in str(desk.ask(scheme="recompute"))
    assert "not between 1 and 1000" in str(desk.ask(every=0))
    assert "by buddy already" in str(desk.ask(every=1))
    with pytest.raises(ValueError, match="no-such"):
        desk.ask(scheme="no-such")
