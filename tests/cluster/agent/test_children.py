"""An agent's vault, standby and look at its host: told in clear reports, never waited for."""

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.agent import node_checker as module
from deadpool_megatron.cluster.agent.members import Member
from deadpool_megatron.cluster.agent.node_checker import NodeChecker
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.process.fork_server import StartedMember
from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout import records
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from tests.common.wait import until

FACTS = HostFacts("at the start", noted="an earlier run put it aside")


def options_of(run: RunDirectory, info: RunInfo) -> AgentOptions:
    """Of node 0."""
    places: Any = {"run": run, "info": info, "directory": run.path.parent}
    how: Any = {"secret": b"", "host": "127.0.0.1", "domain": "", "server": None, "modules": ()}
    return AgentOptions(0, **places, **how)


def examiner(
    directory: Path, seat: int, *command: str, settings: Settings | None = None
) -> tuple[Any, list[Any]]:
    """Of node 0 in an epoch whose only role is on node ``seat``."""
    info = RunInfo("testrun", 1, 1, 1, 1, (), settings or Settings())
    run = RunDirectory(directory)
    sent: list[Any] = []
    options = replace(options_of(run, info), facts=FACTS)
    seats = {0: records.Seat(seat, 0, 0)}
    nodes = {0: records.NodeAddress("127.0.0.1", 1, "node0", spare=seat != 0)}
    record = records.EpochRecord(
        1, seats, nodes, records.Restore("initial", records.Generation(1, 0))
    )
    made = NodeChecker(options, sent.append, lambda: record, command)
    return made, sent


@pytest.fixture
def segments(tmp_path, monkeypatch):
    monkeypatch.setattr(AgentOptions, "segments", property(lambda _: tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("seat", "health", "looks"), [(1, "", True), (0, "", False), (0, "check_node", True)]
)
async def test_a_spare_looks_again_a_node_that_trains_only_at_its_health(
    seat, health, looks, segments, monkeypatch
):
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


def test_facts_are_read_by_a_process_of_its_own(segments):
    made, sent = examiner(segments, 1, "deadpool_megatron", "check", "--json")
    asyncio.run(made.look())
    assert sent[0]["t"] == "facts"
    told = HostFacts.from_dict(sent[0]["facts"])
    assert (told.address, told.noted) == ("127.0.0.1", FACTS.noted)
    assert made.facts() == sent[0]["facts"]


@contextmanager
def talking(directory: Path, reports: Any) -> Iterator[tuple[Member, socket.socket]]:
    """A member of slot 0, and its process's end of their connection."""
    ours, theirs = socket.socketpair()
    watch: Any = SimpleNamespace(pid=os.getpid(), then=lambda _: None)
    spec = MemberSpec(MemberPlace(0, 0, 0), ("x",), {}, directory / "log", directory)
    yield Member(spec, StartedMember(watch, ours), Settings(), reports), theirs
    asyncio.get_running_loop().remove_reader(ours.fileno())
    ours.close()
    theirs.close()


async def test_who_left_an_older_epoch_is_waited_for(tmp_path):
    """What a member has said of that, late or twice, says nothing of the one that is closed now."""
    told: list[Any] = []
    reports = SimpleNamespace(member_reported=lambda member, message: told.append(message))
    with talking(tmp_path, reports) as (member, process):
        assert member.drained(1) is None
        for count, clean in enumerate((True, True, False), 1):
            framing.send(process, {"t": "drained", "epoch": 2, "clean": clean})
            await until(lambda count=count: len(told) == count)  # type: ignore[misc]
            assert [member.drained(epoch) for epoch in (1, 2, 3)] == [clean, clean, None]
            assert member.reports_since(2) == []
