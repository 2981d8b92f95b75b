"""Real gloo groups that meet through the store over a node's links."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.cluster.agent.members import FramePipe
from deadpool_megatron.cluster.link.rendezvous import MemberStore, StoreRelay
from deadpool_megatron.comms import EpochClosed, EpochStore
from deadpool_megatron.wire import framing

from .ranks import DEADLINE_SECONDS, Member, Ranks
from .test_interrupt import check, groups


class MemberEnd:
    """A member, to the relay."""

    def __init__(self, relay: StoreRelay, connection: socket.socket) -> None:
        self._relay = relay
        self._pipe = FramePipe(connection, self._receive, lambda reason: None)

    def _receive(self, message: dict[str, Any]) -> None:
        self._relay.enter(max(self._relay.epoch, message["epoch"]))
        self._relay.from_member(self, message)

    def send(self, message: Any) -> None:
        self._pipe.send(message)

    def kill(self, cause: str) -> None:
        raise AssertionError(cause)


@pytest.fixture
def agent(tmp_path):
    """The path of the socket on which a node's relay serves every member."""
    path = str(tmp_path / "agent")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            asyncio.run(_serve(listener))
        os._exit(1)
    listener.close()
    yield path
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


async def _serve(listener: socket.socket) -> None:
    relay = StoreRelay(lambda message: None)
    listener.setblocking(False)
    while True:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        MemberEnd(relay, connection)


def line_to(path: str) -> MemberStore:
    """A member's end, with its reading thread."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    store = MemberStore(lambda message: framing.send(connection, message))

    def read() -> None:
        while True:
            store.take(framing.receive(connection))

    threading.Thread(target=read, daemon=True).start()
    return store


def attach(member: Member, store: MemberStore, epoch: int, seconds: float = 30.0) -> None:
    member.comms.attach(epoch, EpochStore(store, epoch, seconds), member.rank, seconds)


def several_epochs(member: Member, path: str) -> bool:
    member.init()
    row, column = groups(member)
    store = line_to(path)
    for epoch in (1, 2, 3):
        attach(member, store, epoch)
        assert check(member, row, column)
    late = dist.new_group([0, member.size - 1])
    if member.rank in (0, member.size - 1):
        value = torch.ones(3)
        dist.all_reduce(value, group=late)
        assert value[0].item() == 2.0
    dist.barrier()
    return True


def test_groups_meet_in_every_epoch_and_between(agent):
    with Ranks(4) as ranks:
        assert all(ranks.start(several_epochs, agent).results().values())


def without_a_peer(member: Member, path: str) -> float:
    """Rank 3 is missing in epoch 1, and there in epoch 2."""
    member.init()
    row, column = groups(member)
    store = line_to(path)
    took = 0.0
    if member.rank != 3:

        def close() -> None:
            member.order("close").wait(DEADLINE_SECONDS)
            member.interrupted_at = time.monotonic()
            store.close(1)
            member.comms.interrupt(1)

        threading.Thread(target=close, daemon=True).start()
        member.send(("ready", None))
        with pytest.raises(EpochClosed):
            attach(member, store, 1, DEADLINE_SECONDS)
        took = time.monotonic() - member.interrupted_at
        assert member.comms.drain()
    attach(member, store, 2)
    assert check(member, row, column)
    left = [thread for thread in threading.enumerate() if "waiter" in thread.name]
    assert len(left) <= 2, "no thread stays in the store of epoch 1"
    return took


def test_a_close_ends_the_wait_for_a_peer_that_never_comes(agent):
    with Ranks(4) as ranks:
        ranks.start(without_a_peer, agent)
        for rank in range(3):
            ranks.receive(rank, "ready")
        for rank in range(3):
            ranks.send(rank, "order", "close")
        assert max(ranks.results().values()) < DEADLINE_SECONDS / 2


def test_unsupported_store_methods_raise():
    store = EpochStore(MemberStore(lambda message: None), 1, 1.0)
    prefixed = dist.PrefixStore("e1", store)
    with pytest.raises(RuntimeError, match="pure virtual function"):
        prefixed.add("counter", 1)
    prefixed.set("key", b"value")
    assert prefixed.get("key") == b"value"
    assert prefixed.check(["key"])
    assert not prefixed.check(["other"])
    with pytest.raises(RuntimeError, match="'e1/other' was not written within"):
        EpochStore(MemberStore(lambda message: None), 1, 0.01).get("e1/other")
