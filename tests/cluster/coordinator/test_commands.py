"""Answers of a coordinator that need no run: numbers for agents that come later."""

import asyncio
import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator.commands import _KILL_SECONDS, Commands
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.settings import Settings

NODES, SPARES = 2, 1
AT_START = range(NODES + SPARES)


class InStep(Journal):
    """Whoever lists it waits until another one has listed it as well."""

    def __init__(self, directory: Path, both: threading.Barrier) -> None:
        super().__init__(directory)
        self._both = both

    def numbers(self, kind: str) -> list[int]:
        found = super().numbers(kind)
        self._both.wait(20.0)
        return found


def commands(
    journal: Journal, directory: Path, state: object = None, peers: object = None
) -> Commands:
    """Those of a coordinator of NODES + SPARES nodes."""
    info = SimpleNamespace(nodes=NODES, spares=SPARES, settings=Settings())
    run = SimpleNamespace(exports=directory / "exports")
    term = SimpleNamespace(number=1)
    options = SimpleNamespace(info=info, term=term, journal=journal, run=run, restarted=False)
    one: Any = SimpleNamespace(options=options, state=state, peers=peers, describe=dict)
    return Commands(one)


def attach(one: Commands, taken: Collection[int] = AT_START) -> int:
    answer = one._attach("host", taken)
    assert answer["ok"]
    return int(answer["node"])


@pytest.mark.parametrize("coordinators", [1, 2])
def test_two_agents_of_one_host_that_come_together_are_two_nodes(
    tmp_path: Path, coordinators: int
) -> None:
    """An old coordinator and the next one may both be asked."""
    both = threading.Barrier(2)
    asked = [commands(InStep(tmp_path / "journal", both), tmp_path) for _ in range(coordinators)]
    with ThreadPoolExecutor(2) as threads:
        given = [threads.submit(attach, asked[n % coordinators]) for n in range(2)]
    assert sorted(number.result() for number in given) == [3, 4]


def test_a_number_that_was_handed_out_is_not_given_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    one = commands(journal, tmp_path)
    assert [attach(one), attach(one)] == [3, 4]
    assert attach(one, (*AT_START, 7)) == 8
    assert {entry["hostname"] for entry in journal.entries("node").values()} == {"host"}


@pytest.mark.parametrize(
    ("part", "number", "to", "why"),
    [
        ("role", 1, (0, {"slot": 3, "incarnation": 7}), ""),
        ("node", 2, (2, {}), ""),
        ("role", 2, None, "there is no role 2 (there are 0 to 1)"),
        ("vault", 5, None, "node 5 is not connected (there are: 0, 1, 2)"),
    ],
)
async def test_a_signal_goes_to_the_agent_of_the_part(
    tmp_path: Path, part: str, number: int, to: tuple[int, Any] | None, why: str
) -> None:
    sent: list[object] = []
    peers = SimpleNamespace(order=lambda *order: sent.append(order))
    seats = {0: Seat(1, 0, 0), 1: Seat(0, 3, 7)}
    fleet = SimpleNamespace(nodes=dict.fromkeys(range(3)))
    state = SimpleNamespace(seats=seats, fleet=fleet, phase=Phase.BOOTSTRAPPING, record=object())
    given = commands(Journal(tmp_path / "journal"), tmp_path, state, peers)
    message = {"command": "kill", "part": part, "number": number, "signal": "KILL"}
    assert (await given.answer(message))["again"], "agents come back to a new coordinator"
    state.phase = Phase.RUNNING
    answer = await given.answer(message)
    assert not sent, "the answer goes first: it may be this coordinator's node"
    await asyncio.sleep(2 * _KILL_SECONDS)
    order = {"t": "signal-part", "part": part, "signal": "KILL"}
    assert answer.get("refused", "") == why
    assert sent == ([] if to is None else [(to[0], order | to[1])])
