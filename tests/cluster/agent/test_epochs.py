"""Orders that carry an epoch, given to a whole agent in time, late, early and twice."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.agent.agent import Agent
from deadpool_megatron.cluster.agent.members import Member, NodeMembers
from deadpool_megatron.cluster.agent.vault_process import VaultKeeper
from deadpool_megatron.cluster.link.agent_link import CoordinatorLink
from deadpool_megatron.cluster.process.fork_server import StartedMember
from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    Inventory,
    NodeAddress,
    Restore,
    Seat,
)
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.control import VaultControl
from deadpool_megatron.wire import framing
from tests.cluster.agent.test_children import (
    SECONDS,
    Control,
    info,
    keeper,
    note_starts,
    options_of,
)
from tests.common.waiting import until

__all__ = ["info", "keeper"]
WELCOME = {"t": "welcome", "boot": "first", "record": None}


def record(epoch: int) -> EpochRecord:
    """Its one role sits on another node: nobody here has to leave the epoch."""
    nodes = {n: NodeAddress("127.0.0.1", 1, f"node{n}", spare=n == 0) for n in range(2)}
    restore = Restore("initial", Generation(epoch, 0))
    return EpochRecord(epoch, {0: Seat(1, 0, 0)}, nodes, restore)


def opens(epoch: int) -> Mapping[str, Any]:
    return {"t": "record", "record": record(epoch).to_dict()}


def closes(epoch: int) -> Mapping[str, Any]:
    return {"t": "close", "epoch": epoch, "cause": "a failure"}


def is_obeyed(order: Mapping[str, Any]) -> list[str]:
    """What an order that counts has done, in this order: a member that is interrupted while its
    vault still seals could have sealed what the interrupt has cut off."""
    if order["t"] == "record":
        epoch = order["record"]["epoch"]
        return [f"vault opens {epoch}", f"members enter {epoch}"]
    epoch = order["epoch"]
    return [f"vault closes {epoch}", f"members leave {epoch}", f"inventory of {epoch}"]


class Played:
    """An agent whose vault, members and coordinator are played; ``did``: what it had them do. A
    dump takes until the agent has been asked again for the inventory of epoch 1."""

    def __init__(self, directory: Path, info: RunInfo, monkeypatch: pytest.MonkeyPatch) -> None:
        run = RunDirectory(directory / "run")
        run.create(info)
        self.options = options_of(run, info)
        os.close(cleanup.claim_segments(run, info.run_id))
        self.options.segments.mkdir()
        self.did: list[str] = []
        did = self.did.append

        async def nothing(*_: object) -> None:
            pass

        async def forever(*_: object) -> None:
            await asyncio.Event().wait()

        async def adopt(_: VaultKeeper, record: EpochRecord) -> None:
            await asyncio.sleep(0)
            did(f"vault opens {record.epoch}")

        async def close_epoch(_: VaultKeeper, epoch: int) -> None:
            await asyncio.sleep(0)
            did(f"vault closes {epoch}")

        async def inventory(_: VaultKeeper, epoch: int) -> Inventory:
            return Inventory(0, epoch)

        async def dump(*_: object) -> dict[str, Any]:
            did("dump begins")
            await until(lambda: self.did.count("inventory of 1") == 2, SECONDS)
            did("dump ends")
            return {}

        async def shut_down(_: VaultKeeper, remove: bool) -> None:
            did(f"slots {'go' if remove else 'stay'}")

        def send_all(_: NodeMembers, message: Mapping[str, Any]) -> None:
            if message["t"] == "record":
                did(f"members enter {message['record']['epoch']}")
            elif message["t"] == "close":
                did(f"members leave {message['epoch']}")
            elif message["t"] == "stop":
                did(f"members stop: {message['reason']}")

        def send(_: CoordinatorLink, message: Mapping[str, Any], **__: object) -> None:
            if message["t"] == "inventory":
                did(f"inventory of {message['epoch']}")

        for name, played in {
            "start": nothing,
            "supervise": forever,
            "shut_down": shut_down,
            "adopt": adopt,
            "close_epoch": close_epoch,
            "inventory": inventory,
            "dump": dump,
            "pid": 1 << 30,
        }.items():
            monkeypatch.setattr(VaultKeeper, name, played)
        monkeypatch.setattr(NodeMembers, "send_all", send_all)
        monkeypatch.setattr(CoordinatorLink, "send", send)
        self._monkeypatch = monkeypatch

    def lives(self, play: Callable[[CoordinatorLink], Awaitable[object]]) -> None:
        """All its life, with this beside it where its link would be."""

        async def run(link: CoordinatorLink, _: float) -> None:
            await play(link)

        self._monkeypatch.setattr(CoordinatorLink, "run", run)
        self.agent = Agent(self.options)
        assert asyncio.run(asyncio.wait_for(self.agent.run(), SECONDS)) == 0

    def obeys(self, *orders: Mapping[str, Any] | str) -> list[str]:
        """All that it has done when the last order is obeyed. A text: what it has to have done
        before the next one."""
        found: list[str] = []

        async def play(link: CoordinatorLink) -> None:
            for order in (WELCOME, *orders, "vault opens 99"):
                if isinstance(order, str):
                    await until(lambda order=order: order in self.did, SECONDS)  # type: ignore[misc]
                else:
                    link._on_message(order)
            found[:] = self.did
            link._on_message({"t": "stop", "reason": "the end of the test"})

        self.lives(play)
        return found


@pytest.fixture
def played(tmp_path: Path, info: RunInfo, monkeypatch: pytest.MonkeyPatch) -> Iterator[Played]:
    made = Played(tmp_path, info, monkeypatch)
    yield made
    cleanup.remove_segments(made.options.segments)


@pytest.mark.parametrize(
    ("orders", "counting"),
    [
        ([opens(1), closes(1), opens(2)], [0, 1, 2]),
        ([opens(1), opens(1)], [0]),
        ([opens(2), opens(1)], [0]),
        ([opens(1), closes(1), opens(1), opens(2)], [0, 1, 3]),
        ([closes(3), opens(1), opens(3), opens(4)], [0, 3]),
        ([opens(2), closes(1), closes(2)], [0, 2]),
    ],
    ids=["in-time", "twice", "older", "after-its-close", "close-first", "late-close"],
)
def test_an_order_counts_in_its_epoch(
    played: Played, orders: list[Mapping[str, Any]], counting: list[int]
) -> None:
    wanted = [did for number in counting for did in is_obeyed(orders[number])]
    last = opens(99)
    assert played.obeys(*orders, last) == [*wanted, *is_obeyed(last)]


def test_a_close_that_is_repeated_is_answered_again(played: Played) -> None:
    """And changes nothing: the next coordinator may not know that it was obeyed."""
    found = played.obeys(opens(1), closes(1), closes(1), opens(99))
    answered = ["inventory of 1"]
    assert found == [*is_obeyed(opens(1)), *is_obeyed(closes(1)), *answered, *is_obeyed(opens(99))]


@pytest.mark.parametrize(
    ("opened", "closed", "orders"),
    [(0, 0, []), (3, 0, ["adopt 3"]), (3, 3, ["close 3"]), (4, 3, ["close 3", "adopt 4"])],
)
async def test_a_vault_that_is_started_again_is_where_the_one_before_was(
    keeper: VaultKeeper,
    monkeypatch: pytest.MonkeyPatch,
    opened: int,
    closed: int,
    orders: list[str],
) -> None:
    """One that is told to open a closed epoch refuses, and is given up after some starts."""
    vault = Control()

    async def connect(*_: object) -> Control:
        return vault

    monkeypatch.setattr(VaultControl, "connect", connect)
    note_starts(monkeypatch)
    if opened:
        await keeper.adopt(record(opened))
    if closed:
        await keeper.close_epoch(closed)
    await keeper.start()
    supervising = asyncio.create_task(keeper.supervise())
    await keeper._ready.wait()
    supervising.cancel()
    assert vault.orders == orders


@contextmanager
def talking(directory: Path, reports: Any) -> Iterator[tuple[Member, socket.socket]]:
    """A member of slot 0, and its process's end of their connection."""
    ours, theirs = socket.socketpair()
    watch: Any = SimpleNamespace(pid=os.getpid(), then=lambda _: None)
    spec = MemberSpec(0, 0, 0, ("x",), {}, directory / "log", directory)
    yield Member(spec, StartedMember(watch, ours), Settings(), reports), theirs
    asyncio.get_running_loop().remove_reader(ours.fileno())
    ours.close()
    theirs.close()


async def test_who_left_an_older_epoch_is_waited_for(tmp_path: Path) -> None:
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
