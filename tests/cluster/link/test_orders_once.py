"""Orders and reports arrive once and in order, whatever connection they started on."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from deadpool_megatron.cluster.coordinator.orders import Orders
from deadpool_megatron.cluster.link.agent_link import Contact
from deadpool_megatron.cluster.link.peers import AgentPeer
from deadpool_megatron.cluster.machine import actions
from deadpool_megatron.layout.records import Generation
from tests.cluster.link.line import NODE, Agent, How, Line, play

# Each with a number by which it is known again.


def peers_of(orders: Orders) -> Any:
    return orders._peers


ORDERS: dict[str, Callable[[Orders, int, int], None]] = {
    "start": lambda o, n, node: o.give(actions.StartMembers(node, {0: n}, {})),
    "kill": lambda o, n, node: o.give(actions.KillMember(node, 0, n)),
    "close": lambda o, n, node: o.give(actions.CloseEpoch(n, "a failure")),
    "pause": lambda o, n, node: o.give(actions.Pause(1, n)),
    "dump": lambda o, n, node: o.give(actions.Dump((node,), "/dump", Generation(1, n), "step")),
    "durable-done": lambda o, n, node: peers_of(o).send_all({"t": "durable-done", "iteration": n}),
    "export-take": lambda o, n, node: peers_of(o).order(node, {"t": "export-take", "iteration": n}),
}
NODES = (3, 4, 8)


async def acknowledged(line: Line) -> None:
    await line.until("acknowledgements", lambda: not line.link._unacknowledged)


_NUMBER: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "start": lambda m: m["slots"]["0"],
    "kill": lambda m: m["incarnation"],
    "close": lambda m: m["epoch"],
    "dump": lambda m: m["generation"][1],
}


def obeyed(agent: Line | Agent) -> list[tuple[str, int]]:
    """What the agent was ordered, in order."""
    default: Callable[[Mapping[str, Any]], int] = lambda m: m["iteration"]  # noqa: E731
    return [(m["t"], int(_NUMBER.get(m["t"], default)(m))) for m in agent.obeyed]


def exchange(line: Line, steps: list[str]) -> tuple[list[tuple[str, int]], list[int]]:
    """Give orders and reports; returns what has to arrive in this term."""
    ordered, reported = [], []
    for step in steps:
        number = next(line.numbers)
        if step == "report":
            line.link.send({"t": "report", "value": number})
            reported.append(number)
        else:
            ORDERS[step](line.office.orders, number, NODE)
            ordered.append((step, number))
    return ordered, reported


async def beginning(line: Line) -> None:
    agents = line.office.peers.agents
    await line.until("a welcome", lambda: any(peer.welcomed for peer in agents.values()))


steps = st.lists(st.sampled_from([*ORDERS, "report"]), max_size=4)


@settings(max_examples=100)
@example(rounds=[["start"]], cuts={1: How.DEAF}, pause=1.0).via("deaf just before the welcome")
@example(rounds=[[]], cuts={0: How.LATE, 2: How.RESET}, pause=1.0).via("the greeting beside it")
@given(
    st.lists(steps, min_size=1, max_size=8),
    st.dictionaries(st.integers(0, 60), st.sampled_from(How), max_size=4),
    st.floats(0.05, 1.5),
)
def test_orders_and_reports_arrive_once_despite_cuts(rounds, cuts, pause):
    async def scenario(line: Line) -> None:
        ordered: list[tuple[str, int]] = []
        reported: list[int] = []
        for steps in rounds:
            await line.until(
                "a connection", lambda: line.office.peers.agents or line.office.is_left
            )
            if line.office.is_left:
                return  # cut again and again: given away, and everybody was told
            more, sent = exchange(line, steps)
            ordered += more
            reported += sent
            await asyncio.sleep(pause)
        await line.until(
            f"{ordered} {reported}",
            lambda: (
                line.office.is_left
                or (len(line.obeyed) >= len(ordered) and len(line.office.reports) >= len(reported))
            ),
        )
        await asyncio.sleep(2.0)
        if line.office.is_left:
            # What was reset has half a second to be made again: a second cut may cost the node.
            assert len(cuts) > 1
            assert set(cuts.values()) != {How.LATE}
            return
        assert obeyed(line) == ordered
        assert line.office.reports == reported

    play(cuts, scenario)


@pytest.mark.parametrize("how", How)
def test_retained_reports_reach_a_successor_despite_a_cut(how):
    """The numbers of steps since the newest record: they were written once and then forgotten."""

    async def scenario(line: Line) -> None:
        await beginning(line)
        for number in range(3):
            line.link.send({"t": "report", "value": number}, retain=True)
        await acknowledged(line)
        new, begin = line.take_over(), line.link._begin

        def begin_with_a_cut(session: Contact) -> None:
            if session.term == 2 and not line.cuts and len(new.terms) == 1:
                # The frame that the old one is told first is not the one.
                line.cuts = {line.frames + 1: how}
            begin(session)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(line.link, "_begin", begin_with_a_cut)
            await line.until("a welcome", lambda: new.peers.active())
            await line.until("what is retained", lambda: len(new.reports) == 3)
        assert new.reports == [0, 1, 2]
        assert line.cuts == {}

    play({}, scenario)


@pytest.mark.parametrize("count", [3, 100])
def test_successor_receives_recent_reports_and_short_histories(count):
    """However long ago it was: a report of an hour ago may be the newest there is."""

    async def scenario(line: Line) -> None:
        await beginning(line)
        for number in range(count):
            line.link.send({"t": "report", "value": number}, retain=True)
            if number == 0:
                await asyncio.sleep(60.0)
        await acknowledged(line)
        new = line.take_over()
        await line.until("a welcome", lambda: new.peers.active())
        await line.until("the newest", lambda: count - 1 in new.reports)
        # Of many only the first is old; all others are seconds old.
        assert new.reports == [*range(0 if count == 3 else 1, count)]

    play({}, scenario)


def test_agent_reports_the_term_that_it_follows():
    """By it a coordinator that was superseded hears of its successor, even from an agent that found
    its way back to it."""

    async def scenario(line: Line) -> None:
        await beginning(line)
        line.take_over()
        await beginning(line)
        line.cuts = {line.frames: How.RESET}
        await line.until("another connection", lambda: len(line.office.terms) > 1)
        assert line.office.terms == [1, 2]
        first = line.go_back()
        await line.until("the end of the first", lambda: len(first.newer_terms) == 2)
        assert first.newer_terms == ["node 3: went over to term 2", "node 3: has heard of term 2"]

    play({}, scenario)


def test_agent_with_too_many_unanswered_orders_is_given_up():
    async def scenario(line: Line) -> None:
        await beginning(line)
        for number in range(10_001):
            line.office.peers.send_all({"t": "durable-done", "iteration": number})
        assert line.office.is_left
        assert line.office.peers.agents == {}

    play({}, scenario)


def test_orders_after_a_give_up_overtake_no_order():
    """The others drop an order that comes after one with a higher number."""

    async def scenario(line: Line) -> None:
        office, (first, last) = line.office, sorted(line.agents)
        await line.until("two agents", lambda: len(office.peers.agents) == 2)
        await line.until("welcomes", lambda: len(office.peers.active()) == 2)
        for number in range(10_000):
            office.peers.order(first, {"t": "export-take", "iteration": number})
        left = office.agent_left

        def lose(peer: AgentPeer, cause: str) -> None:
            left(peer, cause)
            office.orders.give(actions.CloseEpoch(1, cause))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(office, "agent_left", lose)
            office.peers.send_all({"t": "durable-done", "iteration": 7})
            assert office.left == {first}
            await line.until("both orders", lambda: len(line.agents[last].obeyed) == 2)
        assert obeyed(line.agents[last]) == [("durable-done", 7), ("close", 1)]

    play({}, scenario, nodes=(3, 4))
