"""What a vault does about a slot that its member overwrites at the same moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    NodeAddress,
    Restore,
    Seat,
)
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, checksum, own_name
from deadpool_megatron.vault.shm.table import Place
from tests.vault.harness import make_layout

LAYOUT = make_layout(0, nbytes=100)
NAMES = ["shard", "tail", "extras@step"]
OLD, NEW = Generation(1, 4), Generation(1, 6)


def sealed(segment: Segment, slot: int, generation: Generation) -> None:
    segment.mark_writing(slot)
    segment.begin(slot, generation, 1)
    segment.fill(slot, dict.fromkeys(NAMES, 10), 1)
    for name in NAMES:
        segment.seal_part(slot, name, 10, checksum(segment.data(slot, name, 10)), 1)
    segment.set_state(slot, SlotState.SEALED)


@pytest.fixture
def state(tmp_path: Path) -> VaultState:
    """Of node 0 in epoch 1, with generations 4 and 5 of role 0; node 1 is the buddy."""
    state = VaultState(0, tmp_path, Settings(), lambda _: None)
    state.adopt(
        EpochRecord(
            epoch=1,
            seats={0: Seat(0, 0, 0)},
            nodes={n: NodeAddress("h", 1, f"rack{n}", n > 0) for n in range(2)},
            restore=Restore("initial", Generation(1, 0)),
            replicas=1,
        )
    )
    path = tmp_path / own_name(0, Seat(0, 0, 0))
    segment = Segment.create(path, LAYOUT, Seat(0, 0, 0), NAMES)
    state.table.segments[path.name] = segment
    sealed(segment, 0, OLD)
    sealed(segment, 1, Generation(1, 5))
    return state


def test_a_slot_that_is_overwritten_meanwhile_is_not_shipped_and_stops_nobody(
    state: VaultState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vault that was restarted does not know any more what is committed, and its member does."""
    table, segment = state.table, next(iter(state.table.segments.values()))
    found = table.find

    def find(role: int, generation: Generation, name: str) -> list[Place]:
        if generation == OLD:
            segment.mark_writing(0)
        return found(role, generation, name)

    monkeypatch.setattr(table, "find", find)
    work = state.shipment(LAYOUT, 1, 1)
    assert work is not None
    assert work[0] == Generation(1, 5)
    assert [place.name for place in work[1]] == NAMES


def test_bytes_that_have_made_way_for_a_newer_generation_are_not_damaged(state: VaultState) -> None:
    """Who read them while they changed must not spoil what has taken their place."""
    told: list[Generation] = []
    state.on_bad = lambda role, generation, part: told.append(generation)
    segment = next(iter(state.table.segments.values()))
    (place,) = state.table.find(0, OLD, "shard")
    segment.data(0, "shard")[0] ^= 0xFF
    sealed(segment, 0, NEW)
    state.mark_bad(place, 0)
    assert segment.entry(0, "shard").state is PartState.SEALED
    assert not told
    (place,) = state.table.find(0, NEW, "shard")
    state.mark_bad(place, 0)
    assert segment.entry(0, "shard").state is PartState.BAD
    assert told == [NEW]
