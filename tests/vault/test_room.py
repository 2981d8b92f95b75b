"""Memory of what nobody is owed any more makes room for what is owed now, and for nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.layout.records import Generation, Restore, RoleLayout
from deadpool_megatron.layout.sizing import copy_bytes
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import room
from deadpool_megatron.vault.epoch_gate import VaultState
from deadpool_megatron.vault.errors import NoRoom
from deadpool_megatron.vault.memory import allocated_bytes, usable_bytes
from deadpool_megatron.vault.shm.segment import Segment
from deadpool_megatron.vault.shm.table import Place
from tests.vault.harness import make_layout, record_of

NBYTES = 256 << 10
OLD, NEW = 0, 1  # roles whose copies this node keeps in epoch 1 and in epoch 2
SHARDS = ("shard", "tail")
RESTORED = Generation(1, 6)


class Keeper:
    """The vault of node 2, a spare with memory for both slots of one role and little more.

    Epoch 1: copies of role 0 of two generations are here. Epoch 2 goes on from the newer one; it is
    role 1 that node 2 keeps now.
    """

    def __init__(self, directory: Path, slots: int = 2) -> None:
        self.layouts = {r: make_layout(r, NBYTES, slots, peers=(r,)) for r in (OLD, NEW)}
        limit = copy_bytes(self.layouts[OLD], (NBYTES, 1000)) + 40_000
        settings = Settings(memory_gb=limit / 1e9)
        self.state = VaultState(2, directory, settings, lambda _: None)
        self.adopt(1, Restore("initial", Generation(0, 0)), OLD)
        self.old = room.ensure_copy(self.state, self.layouts[OLD], RESTORED)
        for iteration in (5, 6):
            self.put(self.old, Generation(1, iteration), 1)
        self.state.close(1)
        self.adopt(2, Restore("memory", RESTORED, "step"), NEW)

    def adopt(self, epoch: int, restore: Restore, kept: int) -> None:
        """The one role with a seat has no other buddy; of any other role node 2 is none."""
        whole = record_of(epoch, (kept,), 3, restore=restore)
        self.state.adopt(replace(whole, nodes={n: whole.nodes[n] for n in (kept, 2)}))

    def put(self, segment: Segment, generation: Generation, epoch: int) -> None:
        slot = self.state.claim(segment, generation, epoch)
        assert slot is not None
        room.reserve(self.state, segment, SHARDS, slot, generation)
        for name in SHARDS:
            self.state.seal_copy(segment, slot, name, 0, 0, epoch)
        self.state.release(segment, slot)

    def held(self, role: int) -> list[int]:
        return sorted(s.generation.iteration for s in self.state.table.sealed(role) if s.parts)


def owes(keeper: Keeper, layout: RoleLayout) -> bool:
    assert keeper.state.ledger is not None
    return bool(keeper.state.ledger.scheme.keeps(layout, 2))


def test_older_copies_make_room_for_the_first_one_of_the_new_epoch(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    assert not owes(keeper, keeper.layouts[OLD])
    copy = room.ensure_copy(keeper.state, keeper.layouts[NEW], RESTORED)
    keeper.put(copy, RESTORED, 2)
    assert keeper.held(NEW) == [6]
    assert keeper.held(OLD) == [6], "nobody has committed anything newer yet"
    keeper.put(copy, Generation(2, 7), 2)
    assert keeper.held(NEW) == [6, 7]
    assert keeper.held(OLD) == [], "all have committed the one that the epoch began with"
    assert allocated_bytes(tmp_path) <= usable_bytes(tmp_path, keeper.state.settings.memory_bytes)


def test_with_three_slots_the_second_one_is_the_proof(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, slots=3)
    room.give_back(keeper.state, Generation(2, 7))
    assert keeper.held(OLD) == [6]
    room.give_back(keeper.state, Generation(2, 8))
    assert keeper.held(OLD) == []


def test_what_somebody_reads_or_is_owed_stays(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    (slot,) = [s for s in keeper.state.table.sealed(OLD) if s.generation.iteration == 5]
    place = Place(slot.segment, slot.slot, "shard", 0, 0, 1)
    keeper.state.table.pin(place)
    assert not room.give_back(keeper.state, RESTORED)
    assert keeper.held(OLD) == [5, 6]
    keeper.state.table.unpin(place)
    keeper.state.close(2)
    assert not room.give_back(keeper.state, RESTORED), "promised"
    keeper.adopt(3, Restore("memory", RESTORED, "step"), OLD)
    assert owes(keeper, keeper.layouts[OLD])
    assert not room.give_back(keeper.state, Generation(3, 7))
    copy = room.ensure_copy(keeper.state, keeper.layouts[NEW], RESTORED)
    with pytest.raises(NoRoom):
        keeper.put(copy, Generation(3, 7), 3)
