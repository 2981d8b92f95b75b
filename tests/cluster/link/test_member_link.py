"""A member's link, against an agent that is driven by hand."""

import socket
import threading
from typing import Any

import pytest

from deadpool_megatron.cluster.link.member_link import Handlers, MemberLink, StopOrder
from deadpool_megatron.cluster.process import member_place
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import framing
from deadpool_megatron.wire.framing import readable

SECONDS = 20.0


def record(epoch: int) -> dict[str, Any]:
    restore = Restore("initial", Generation(epoch, 0))
    return EpochRecord(epoch, {0: Seat(0, 0, 0)}, {}, restore).to_dict()


class Agent:
    """The other end; orders are followed by a wait for the next beat, to know they are in."""

    def __init__(self) -> None:
        self.socket, member = socket.socketpair()
        self.socket.settimeout(SECONDS)
        self.calls: list[tuple[Any, ...]] = []
        self.link = MemberLink(member, MemberPlace(0, 0, 0), "run", Settings())
        self.section = "train"

    def start(self) -> None:
        self.link.start(
            Handlers(
                on_close=lambda epoch, cause: self.calls.append(("close", epoch, cause)),
                on_pause=lambda iteration: self.calls.append(("pause", iteration)),
                status=lambda: {"section": self.section, "iteration": 3},
                on_durable=lambda iteration: self.calls.append(("durable", iteration)),
            )
        )

    def expect(self, kind: str) -> dict[str, Any]:
        while True:
            message = framing.receive(self.socket)
            if message["t"] == kind:
                return message

    def order(self, message: dict[str, Any]) -> None:
        """Send, then wait for two beats: the first may have been on its way."""
        framing.send(self.socket, message)
        self.expect("beat")
        self.expect("beat")

    def interrupted(self) -> bool:
        return readable(self.link.interrupt_fd, 0)


@pytest.fixture
def agent():
    agent = Agent()
    yield agent
    agent.link.close()
    agent.socket.close()


@pytest.mark.slow
def test_close_interrupts_until_a_newer_record(agent):
    agent.start()
    agent.order({"t": "record", "record": record(1)})
    assert agent.link.wait_record(0, SECONDS).epoch == 1
    assert not agent.interrupted()
    agent.order({"t": "close", "epoch": 1, "cause": "node 1: gone"})
    assert agent.interrupted()
    agent.order({"t": "close", "epoch": 1, "cause": "told twice"})
    agent.order({"t": "record", "record": record(1)})
    for known in (1, 0):  # nor is one taken that was closed before
        with pytest.raises(TimeoutError, match="newer than epoch"):
            agent.link.wait_record(known, 0.01)
    agent.order({"t": "record", "record": record(2)})
    assert agent.interrupted()
    assert agent.link.wait_record(1, SECONDS).epoch == 2
    assert not agent.interrupted()
    assert agent.calls == [("close", 1, "node 1: gone")]


def test_stop_ends_a_wait_and_interrupts(agent):
    agent.start()
    found: list[str] = []

    def wait() -> None:
        try:
            agent.link.wait_record(0, SECONDS)
        except StopOrder as order:
            found.append(str(order))

    waiter = threading.Thread(target=wait)
    waiter.start()
    agent.order({"t": "stop", "reason": "all done"})
    waiter.join(SECONDS)
    assert found == ["all done"]
    assert agent.interrupted()
    assert agent.link.stopped


OPENS, CLOSES = (
    {epoch: {"t": "record", "record": record(epoch)} for epoch in (1, 2)},
    {epoch: {"t": "close", "epoch": epoch, "cause": "gone"} for epoch in (1, 2)},
)
PAUSES = {"t": "pause", "iteration": 12, "epoch": 1}


@pytest.mark.parametrize(
    ("orders", "calls"),
    [
        ([OPENS[1], PAUSES], [("pause", 12)]),
        ([PAUSES, OPENS[1]], []),
        ([OPENS[1], CLOSES[1], PAUSES, OPENS[2]], [("close", 1, "gone")]),
        ([OPENS[1], CLOSES[1], OPENS[2], PAUSES], [("close", 1, "gone")]),
        ([OPENS[1], CLOSES[1], CLOSES[1]], [("close", 1, "gone")]),
        ([OPENS[2], CLOSES[2], CLOSES[1]], [("close", 2, "gone")]),
    ],
    ids=["in-time", "early", "closed", "late", "close-twice", "late-close"],
)
def test_orders_reach_their_handlers_in_their_epoch(agent, orders, calls):
    agent.start()
    for order in orders:
        framing.send(agent.socket, order)
    agent.order({"t": "durable-done", "iteration": 10})
    assert agent.calls == [*calls, ("durable", 10)]


def test_broken_status_is_reported_once_between_beats(agent):
    agent.start()
    agent.expect("beat")
    handlers = Handlers(*(lambda *_: None for _ in range(2)), status=lambda: {}["no such key"])
    agent.link._handlers = handlers
    assert "no such key" in agent.expect("event")["event"]["data"]["text"]
    assert agent.expect("beat")["section"] == "unknown"


def test_send_never_blocks_and_keeps_the_order(agent):
    agent.start()
    text = "x" * 5000
    for number in range(500):
        agent.link.send({"t": "data", "number": number, "text": text})
    assert not agent.link.flush(0.01)
    numbers = [agent.expect("data")["number"] for _ in range(500)]
    assert numbers == list(range(500))
    assert agent.link.flush(SECONDS)


def test_member_without_agent_names_the_right_command(monkeypatch):
    monkeypatch.delenv(member_place.VARIABLE, raising=False)
    with pytest.raises(RuntimeError, match="deadpool run"):
        MemberLink.from_environment()
