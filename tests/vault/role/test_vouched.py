"""What a role's owner has vouched for counts for the generation that it was said of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.layout.part_kinds import gradients_part
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    NodeAddress,
    Recipe,
    Replay,
    Restore,
    RoleLayout,
    Seat,
    Source,
)
from deadpool_megatron.layout.replaying import key, step_parts
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.net.transport import Transport
from deadpool_megatron.vault.role.restore import Obtainer
from deadpool_megatron.vault.server import Server
from deadpool_megatron.vault.shm.segment import Segment, checksum
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import content, make_layout

SHARD, EXTRAS = "shard", "extras@step"
BASE, RESTORED = Generation(1, 3), Generation(1, 4)
STEP = gradients_part(SHARD)
SEATS = {0: Seat(2, 0, 0)}
NODES = {node: NodeAddress("h", node, f"rack{node}") for node in range(3)}


def with_steps() -> RoleLayout:
    """The harness's layout of one shard part, and what its updates use."""
    plain = make_layout(0, nbytes=1000)
    parts = [part for part in plain.parts if part.name != "tail"]
    steps = step_parts({SHARD: replace(parts[0], nbytes=300)}, 100, 0)
    return replace(plain, parts=(parts[0], *steps, *parts[1:]))


LAYOUT = with_steps()


def keep(segment: Segment, slot: int, generation: Generation, names: list[str]) -> None:
    """Seal parts of a generation in a slot of a copy."""
    segment.reserve(names, [slot])
    segment.open_slot(slot, generation, 1)
    for name in names:
        view = segment.data(slot, name)
        view[:] = content(0, generation, name, len(view))
        segment.seal_part(slot, name, len(view), checksum(view), 1)


@pytest.fixture
def vaults(tmp_path: Path) -> Iterator[tuple[list[VaultState], list[Transport]]]:
    """Role 0 comes to node 2. On node 1 is a chain of its shard; on node 0 are the extras, and what
    the shard was like, which peers of the role held in the end."""
    network = FakeNetwork()
    states: list[VaultState] = []
    servers: list[Server] = []
    transports: list[Transport] = []
    for node in NODES:
        directory = tmp_path / f"node{node}"
        directory.mkdir()
        states.append(VaultState(node, directory, Settings(restore_seconds=5.0), lambda _: None))
        transports.append(network.transport("h", node, 5.0))
        servers.append(Server(states[node], transports[node]))
        servers[node].start()
    copy = states[0].ensure_copy(LAYOUT)
    keep(copy, 0, RESTORED, [EXTRAS])
    whole = content(0, RESTORED, SHARD, 1000)
    copy.note_part(0, SHARD, len(whole), checksum(memoryview(whole)), 1)
    keep(states[1].ensure_copy(LAYOUT), 0, BASE, [SHARD])
    keep(states[1].ensure_steps(LAYOUT), 0, RESTORED, [STEP])
    for state in states:
        state.close(1)
    yield states, transports
    for server, transport in zip(servers, transports, strict=True):
        server.stop()
        transport.close()


def test_a_base_is_not_held_against_what_it_became(
    vaults: tuple[list[VaultState], list[Transport]],
) -> None:
    """The chain was planned because all who held the part itself are gone."""
    states, transports = vaults
    chain = {BASE: {SHARD: (Source(1, 0),)}, RESTORED: {STEP: (Source(1, 0),)}}
    restore = Restore(
        "memory",
        RESTORED,
        sources={0: {EXTRAS: (Source(0, 0),)}},
        recipes={0: Recipe(replay=Replay(BASE, (RESTORED,), chain))},
    )
    record = EpochRecord(2, SEATS, NODES, restore)
    for state in states:
        state.adopt(record)
    places = Obtainer(states[2], transports[2], record, 0).obtain(LAYOUT)
    assert set(places) == {EXTRAS, key(BASE, SHARD), key(RESTORED, STEP)}
    assert bytes(places[key(BASE, SHARD)].view) == content(0, BASE, SHARD, 1000)
