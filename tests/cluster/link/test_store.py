"""The store between members, agents and coordinators: the real parts, on lines that can be cut."""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from hypothesis import given, strategies as st

from deadpool_megatron.cluster.link.rendezvous import CoordinatorStore, MemberStore, StoreRelay
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

    def receive(self, node: int) -> bool:
        if not self.up[node]:
            return False
        self.coordinator.receive(node, self.up[node].popleft())
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
            moved = [act(node) for node in nodes for act in (self.receive, self.obey)]
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
def test_store_delivers_every_value_despite_cuts_and_takeovers(moves):
    asyncio.run(_play(moves))


async def _play(moves: list[tuple[int, int]]) -> None:
    world = World(3)
    written: set[tuple[int, int]] = set()

    def write(role: int, number: int) -> None:
        roles = GROUPS[number]
        if role in roles and (role, number) not in written:
            written.add((role, number))
            keys = keys_of(roles)
            world.members[role].store.set(EPOCH, keys[roles.index(role)], bytes([role]))
            world.members[role].store.has(EPOCH, keys)

    for move, where in moves:
        if move < 24:
            write(where, move % len(GROUPS))
        elif move < 30:
            world.receive(where % 3)
        elif move < 36:
            world.obey(where % 3)
        elif move < 39:
            world.cut(where % 3)
        elif move == 39:
            world.take_over()
        await asyncio.sleep(0)
    for number in range(len(GROUPS)):
        for role in range(6):
            write(role, number)
    await world.settle()
    for roles in GROUPS:
        for role in roles:
            for key, peer in zip(keys_of(roles), roles, strict=True):
                assert world.members[role].store.get(EPOCH, key, 0.0) == bytes([peer])
