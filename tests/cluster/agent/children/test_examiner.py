"""What an agent does to know its host: looks again while it is a spare, and never hangs by it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cluster.agent.children import examiner as module
from deadpool_megatron.cluster.agent.children.examiner import Examiner
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.records import EpochRecord, Generation, NodeAddress, Restore, Seat
from deadpool_megatron.preflight.facts import HostFacts
from deadpool_megatron.settings import Settings

FACTS = HostFacts("at the start", noted="an earlier run put it aside")


class FakeVault:
    """Answers every probe the same, or not at all."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def probe(self, peers: list[Any], limit: float, *, bulk: bool) -> list[dict[str, Any]]:
        if self.error is not None:
            raise self.error
        return [{"peer": peer, "bulk": bulk} for peer, _, _ in peers]


def examiner(
    directory: Path, seat: int, *command: str, vault: Any = None, settings: Settings | None = None
) -> tuple[Any, list[Any]]:
    """Of node 0 in an epoch whose only role is on node ``seat``."""
    info = RunInfo("testrun", 1, 1, 1, 1, (), settings or Settings(), "")
    run = RunDirectory(directory)
    sent: list[Any] = []
    options = AgentOptions(
        node=0,
        run=run,
        info=info,
        secret=b"",
        host="127.0.0.1",
        domain="",
        modules=(),
        directory=directory,
        facts=FACTS,
    )
    seats = {0: Seat(seat, 0, 0)}
    nodes = {0: NodeAddress("127.0.0.1", 1, "node0", spare=seat != 0)}
    record = EpochRecord(1, seats, nodes, Restore("initial", Generation(1, 0)))
    made = Examiner(options, vault or FakeVault(), sent.append, lambda: record, command)
    return made, sent


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(AgentOptions, "segments", property(lambda _: tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("seat", "health", "looks"), [(1, "", True), (0, "", False), (0, "check_node", True)]
)
async def test_a_spare_looks_again_a_node_that_trains_only_at_its_health(
    seat: int, health: str, looks: bool, segments: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    made, sent = examiner(segments, seat, settings=Settings(health_command=health))
    looked = 0

    async def look() -> None:
        nonlocal looked
        looked += 1

    made.look = look
    running = asyncio.create_task(made.run())
    for _ in range(20):
        await asyncio.sleep(0)
    running.cancel()
    assert bool(looked) == looks
    assert sent == []


def test_facts_are_read_by_a_process_of_its_own(segments: Path) -> None:
    made, sent = examiner(segments, 1, "deadpool_megatron", "check", "--json")
    asyncio.run(made.look())
    assert sent[0]["t"] == "facts"
    told = HostFacts.from_dict(sent[0]["facts"])
    assert (told.address, told.noted) == ("127.0.0.1", FACTS.noted)
    assert made.told() == sent[0]["facts"]


@pytest.mark.parametrize("command", [("timeit", "-n1", "-r1", "while True: pass"), ("this",)])
def test_what_cannot_be_found_out_stays_as_it_was(command: tuple[str, ...], segments: Path) -> None:
    """A process that hangs, and one that answers nothing of use."""
    made, sent = examiner(segments, 1, *command)
    made._limit_seconds = 0.3 if command[0] == "timeit" else 30.0
    made._command = command
    asyncio.run(made.look())
    assert sent == []
    assert HostFacts.from_dict(made.told()) == FACTS


def test_a_vault_that_does_not_answer_is_no_reason_to_end(segments: Path) -> None:
    order = {"number": 3, "peers": [[1, "h", 2]], "bulk": True, "limit_seconds": 5.0}

    async def ask(vault: FakeVault) -> Any:
        made, sent = examiner(segments, 1, vault=vault)
        made.probe(order)
        await asyncio.gather(*made._tasks)
        return sent

    good = asyncio.run(ask(FakeVault()))
    assert good == [{"t": "probed", "number": 3, "links": [{"peer": 1, "bulk": True}]}]
    bad = asyncio.run(ask(FakeVault(TimeoutError("late"))))
    assert bad == [{"t": "probed", "number": 3, "links": []}]
