"""What an agent tells a coordinator that takes over of what its members have said."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from deadpool_megatron.cluster.agent.members.members import Member, Members
from deadpool_megatron.cluster.agent.members.reporter import MemberReporter
from deadpool_megatron.cluster.agent.service import Agent


class Node:
    """An agent with one member. ``told``: what its coordinator hears of that."""

    def __init__(self) -> None:
        self.told: list[Mapping[str, Any]] = []
        self.ordered: list[Mapping[str, Any]] = []
        agent: Any = object.__new__(Agent)
        members: Any = object.__new__(Members)
        member: Any = object.__new__(Member)
        member.slot, member.incarnation, member.said = 0, 0, {}
        member._freeze = SimpleNamespace(beat=lambda now: None)
        member._reports = agent
        member._pipe = SimpleNamespace(send=self.ordered.append)
        members.by_slot = {0: member}
        agent._boot, agent._closed, agent._record, agent._members = "", 0, None, members
        agent._reporter = MemberReporter(3, members, lambda report: self.told.append(report["m"]))
        agent._exports = SimpleNamespace(drop=lambda: None)
        agent._store = SimpleNamespace(repeat=lambda: None)
        self.agent, self.member = agent, member
        self.meet("first")

    def meet(self, boot: str) -> None:
        self.told.clear()
        self.agent._on_order({"t": "welcome", "boot": boot, "record": None})

    def ask(self, iteration: int, epoch: int = 1) -> dict[str, Any]:
        request = {"t": "durable-request", "epoch": epoch, "iteration": iteration}
        self.member._message(request)
        return request

    def done(self, iteration: int) -> None:
        order = {"t": "durable-done", "iteration": iteration}
        self.agent._on_order(order)
        assert self.ordered[-1] == order


def test_a_save_that_waits_is_told_to_each_coordinator_until_it_is_valid() -> None:
    """The one that was asked may have died in the sync of its files, long after it said yes."""
    node = Node()
    request = node.ask(10)
    node.meet("second")
    assert node.told == [request]
    node.done(5)
    node.meet("third")
    assert node.told == [request], "that was the answer to an earlier request"
    node.done(10)
    node.meet("fourth")
    assert node.told == []


def test_a_save_of_a_closed_epoch_is_not_told_again() -> None:
    node = Node()
    node.ask(10)
    node.agent._closed = 1
    node.meet("second")
    assert node.told == []
    request = node.ask(10, epoch=2)
    node.meet("third")
    assert node.told == [request]
