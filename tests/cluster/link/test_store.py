"""The store between members, agents and coordinators: the real parts, on lines that can be cut."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.cluster.link import rendezvous
from deadpool_megatron.cluster.link.rendezvous import (
    CoordinatorStore,
    MemberStore,
    StoreHub,
    StoreRelay,
)
from deadpool_megatron.wire.framing import FrameBuffer

EPOCH = 5
SLOTS = 2


class World:
    """Nodes with two members each; nothing is delivered by itself."""

    def __init__(self, nodes: int) -> None:
        self.epoch = EPOCH
        self.up: list[deque[Mapping[str, Any]]] = [deque() for _ in range(nodes)]
        self.down: list[deque[dict[str, Any]]] = [deque() for _ in range(nodes)]
        self.relays = [StoreRelay(queue.append) for queue in self.up]
        for relay in self.relays:
            relay.enter(EPOCH)
        self.members = [Member(relay) for relay in self.relays for _ in range(SLOTS)]
        self.take_over()

    def take_over(self) -> None:
        """The coordinator dies; the agents greet the next one, which knows nothing."""
        self.coordinator = CoordinatorStore(self.send, lambda: self.epoch)
        for node in range(len(self.relays)):
            self.cut(node)

    def cut(self, node: int) -> None:
        """What is under way to an agent is lost; its own reports come again, after the others."""
        self.down[node].clear()
        self.relays[node].repeat()

    def send(self, node: int, frame: bytes) -> None:
        self.down[node] += FrameBuffer().feed(frame)

    def hear(self, node: int) -> bool:
        if not self.up[node]:
            return False
        self.coordinator.heard(node, self.up[node].popleft())
        return True

    def obey(self, node: int) -> bool:
        if not self.down[node]:
            return False
        self.relays[node].from_coordinator(self.down[node].popleft())
        return True

    async def settle(self) -> None:
        """Deliver everything."""
        while True:
            await asyncio.sleep(0)
            nodes = range(len(self.relays))
            moved = [act(node) for node in nodes for act in (self.hear, self.obey)]
            await asyncio.sleep(0)
            if not any(moved) and not any(self.up) and not any(self.down):
                return


class Member:
    def __init__(self, relay: StoreRelay) -> None:
        self.received: list[str] = []
        self.killed = ""
        self.store = MemberStore(lambda message: relay.from_member(self, message))

    def send(self, message: Mapping[str, Any]) -> None:
        self.received += message["values"]
        self.store.take(message)

    def kill(self, cause: str) -> None:
        self.killed = cause


def keys_of(roles: list[int]) -> list[str]:
    return [f"{'-'.join(map(str, roles))}/{role}" for role in roles]


GROUPS = ([0, 1, 2, 3, 4, 5], [0, 1], [1, 2], [3, 5])


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=60))
def test_everybody_gets_every_value_whatever_is_cut_and_whoever_coordinates(
    moves: list[tuple[int, int]],
) -> None:
    asyncio.run(_play(moves))


async def _play(moves: list[tuple[int, int]]) -> None:
    world = World(3)
    said: set[tuple[int, int]] = set()

    def say(role: int, number: int) -> None:
        roles = GROUPS[number]
        if role in roles and (role, number) not in said:
            said.add((role, number))
            keys = keys_of(roles)
            world.members[role].store.set(EPOCH, keys[roles.index(role)], bytes([role]))
            world.members[role].store.has(EPOCH, keys)

    for move, where in moves:
        if move < 24:
            say(where, move % len(GROUPS))
        elif move < 30:
            world.hear(where % 3)
        elif move < 36:
            world.obey(where % 3)
        elif move < 39:
            world.cut(where % 3)
        elif move == 39:
            world.take_over()
        await asyncio.sleep(0)
    for number in range(len(GROUPS)):
        for role in range(6):
            say(role, number)
    await world.settle()
    for roles in GROUPS:
        for role in roles:
            for key, peer in zip(keys_of(roles), roles, strict=True):
                assert world.members[role].store.get(EPOCH, key, 0.0) == bytes([peer])


def playing(play: Callable[[World], Any]) -> World:
    """The world after ``play`` and everything that follows from it."""

    async def run() -> World:
        world = World(2)
        play(world)
        await world.settle()
        return world

    return asyncio.run(run())


def test_nothing_of_another_epoch_gets_through() -> None:
    def play(world: World) -> None:
        world.members[0].store.set(EPOCH - 1, "world/0", b"stale")
        world.members[2].store.has(EPOCH, ["world/0"])
        # An agent that has not heard of the close, and a coordinator that has closed.
        world.members[1].store.set(EPOCH, "world/1", b"closed")
        world.epoch = 0

    world = playing(play)
    assert [member.received for member in world.members] == [[], [], [], []]

    def close_on_the_node(world: World) -> None:
        world.relays[1].enter(0)
        world.members[0].store.set(EPOCH, "world/0", b"here")
        world.members[2].store.has(EPOCH, ["world/0"])

    assert playing(close_on_the_node).members[2].received == []


async def test_members_of_a_node_ask_once_and_share_what_is_said() -> None:
    sent: list[int] = []
    world = World(2)
    for member in world.members:
        member.store.has(EPOCH, ["world/0", "world/1"])
    await asyncio.sleep(0)
    sent.extend(len(queue) for queue in world.up)
    await world.settle()
    world.members[0].store.set(EPOCH, "world/0", b"0")
    world.members[1].store.set(EPOCH, "world/1", b"1")
    await asyncio.sleep(0)
    sent.extend(len(queue) for queue in world.up)
    assert sent == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "said",
    [
        {"t": "store", "epoch": EPOCH, "values": {"k": 1}, "want": []},
        {"t": "store", "epoch": EPOCH, "values": [], "want": []},
        {"t": "store", "epoch": "5", "values": {}, "want": []},
        {"t": "store", "epoch": EPOCH, "values": {}, "want": [7]},
        {"t": "store", "epoch": EPOCH, "values": {}, "want": ["f" * 1000]},
        rendezvous.pack(EPOCH, {"k": "A" * (2 * rendezvous.MAXIMUM_VALUE_BYTES)}),
        {"t": "store"},
    ],
)
async def test_garbage_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="store"):
        rendezvous.unpack(said)
    world = World(1)
    world.relays[0].from_member(world.members[0], said)
    assert "sent garbage" in world.members[0].killed
    with pytest.raises(ValueError, match="store"):
        world.coordinator.heard(0, said)
    world.relays[0].from_coordinator(said)  # printed; the agent lives


def test_what_an_epoch_holds_is_bounded() -> None:
    hub: StoreHub[int] = StoreHub(maximum_bytes=1000)
    hub.enter(1)
    hub.put({"a/1": "A" * 500})
    with pytest.raises(ValueError, match="over 1000 bytes"):
        hub.put({"a/2": "A" * 500})
    hub.enter(2)
    for number in range(5):
        hub.want(number, f"folder-{number}")
    with pytest.raises(ValueError, match="over 1000 bytes"):
        hub.want(5, "f" * 500)
    hub.enter(3)
    assert hub.put({"a/2": "A" * 500})


def test_the_first_value_of_a_key_stays() -> None:
    hub: StoreHub[int] = StoreHub()
    hub.enter(1)
    hub.want(7, "a")
    assert hub.put({"a/1": "AA=="}) == {"a/1": "AA=="}
    assert hub.put({"a/1": "AQ=="}) == {}
    assert list(hub.deliveries()) == [([7], {"a/1": "AA=="})]
    assert list(hub.deliveries()) == []
