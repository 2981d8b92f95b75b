"""What a vault restores for a role lies in the role's own slots, whoever dies in between."""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Generation, Inventory, Restore, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import errors, slot_store
from deadpool_megatron.vault.memory import allocated_bytes
from deadpool_megatron.vault.role_worker import RoleWorker
from deadpool_megatron.vault.schemes.registry import scheme_of
from deadpool_megatron.vault.shm.segment import Segment, SlotState, copy_name, own_name
from deadpool_megatron.vault.shm.table import Place
from tests.vault import harness
from tests.vault.harness import Cluster, Member, Node, cluster, make_layout, memory, wait_until
from tests.vault.protected import FIRST, LAYOUTS, begin, flip, swap

PARTS = {"shard", "tail", "extras@step"}


def _held(node: Node, role: int = 1) -> set[str]:
    """Parts of the first generation that the node's vault would give away now."""
    found = (h for h in node.status()["holdings"] if h["role"] == role)
    return {name for h in found if h["generation"] == FIRST.to_list() for name in h["parts"]}


def _restored(node: Node) -> None:
    wait_until(lambda: _held(node) >= PARTS, "the parts of role 1")


def _lose_one(running: Cluster) -> dict[int, Inventory]:
    begin(running)
    running.nodes[1].die()
    return running.close(1, gone={1})


def _addresses(*views: memoryview) -> set[int]:
    return {np.frombuffer(view, np.uint8).ctypes.data for view in views}


def _sent(node: Node) -> int:
    return int(node.status()["counters"].get("bytes fetched from here", 0))


def test_the_restored_generation_is_the_first_of_the_own_slots(tmp_path):
    with cluster(tmp_path, 3, roles=2) as running:
        spare = running.nodes[2]
        record = swap(running, _lose_one(running), FIRST)
        running.open(record)
        _restored(spare)  # nobody has asked for it yet
        files = {path.name for path in spare.directory.glob("*.seg")}
        fresh = Member(spare, LAYOUTS[1])
        assert own_name(1, fresh.seat) in files
        assert copy_name(1) not in files
        fresh.client.register(LAYOUTS[1], 2)
        fresh.check(record)
        assert fresh.wait(FIRST) == "committed"
        kept = fresh.client.sealed_part(FIRST, "shard")
        before = bytes(kept)
        fresh.write(Generation(2, 1))
        assert bytes(kept) == before, "another slot was there to be written"


def test_parked_slots_receive_restored_parts(tmp_path):
    """No memory is taken in a recovery; and it is read where the process had it before, so that a
    device, which was told of it then, copies out of it by itself."""
    with cluster(tmp_path, 3, roles=2) as running:
        spare = running.nodes[2]
        fresh = Member(spare, LAYOUTS[1])
        fresh.client.park(LAYOUTS[0])
        taken = allocated_bytes(spare.directory)
        (parked,) = spare.directory.glob(".parked-*")
        told = _addresses(*fresh.client.slot_views(["shard"]))
        known = parked.stat().st_ino
        record = swap(running, _lose_one(running), FIRST)
        spare.adopt(record)
        running.nodes[0].adopt(record)
        _restored(spare)
        own = spare.directory / own_name(1, fresh.seat)
        assert own.stat().st_ino == known
        copies = spare.directory / copy_name(0)
        of_others = copies.stat().st_blocks * 512 if copies.exists() else 0
        assert allocated_bytes(spare.directory) - of_others <= taken
        fresh.client.register(LAYOUTS[1], 2)
        assert _addresses(*fresh.client.slot_views(["shard"])) == told
        assert _addresses(fresh.restore(record).part("shard")) < told
        fresh.check(record)
        fresh.step(Generation(2, 1))


def test_a_vault_restarted_before_the_member_has_come_fetches_nothing_again(tmp_path):
    with cluster(tmp_path, 3, roles=2) as running:
        spare, source = running.nodes[2], running.nodes[0]
        record = swap(running, _lose_one(running), FIRST)
        running.open(record)
        _restored(spare)
        sent = _sent(source)
        spare.kill()
        spare.restart(record)
        fresh = Member(spare, LAYOUTS[1], 2)
        fresh.check(record)
        assert _sent(source) == sent > 0
        assert fresh.wait(FIRST) == "committed"


def test_a_vault_killed_while_it_restores_goes_on_in_the_same_slot(tmp_path):
    with cluster(tmp_path, 3, roles=2) as running:
        spare = running.nodes[2]
        inventories = _lose_one(running)
        record = swap(running, inventories, FIRST)
        # As a kill after one part leaves it: the slot is of the generation, and lacks the rest.
        seat = Seat(2, 0, 0)
        path = spare.directory / own_name(1, seat)
        left = Segment.create(path, LAYOUTS[1], seat, ["shard"])
        left.open_slot(1, FIRST, 2)
        running.open(record)
        Member(spare, LAYOUTS[1], 2).check(record)
        assert left.state(0) is SlotState.EMPTY
        assert left.generation(1) == FIRST


def test_the_next_process_on_the_place_gets_it_from_the_slots_of_the_last(tmp_path):
    """The first one has died between the restore and its registration."""
    with cluster(tmp_path, 3, roles=2) as running:
        spare, source = running.nodes[2], running.nodes[0]
        running.open(swap(running, _lose_one(running), FIRST))
        _restored(spare)
        sent = _sent(source)
        inventories = running.close(2, gone={1})
        record = swap(running, inventories, FIRST, epoch=3, to=Seat(2, 0, 1))
        running.open(record)
        survivor = source.clients[0]
        survivor.register(LAYOUTS[0], 3)
        fresh = Member(spare, LAYOUTS[1], 3, incarnation=1)
        fresh.check(record)
        assert _sent(source) == sent, "all of it was on the node"
        assert fresh.wait(FIRST) == "committed"
        old = spare.directory / own_name(1, Seat(2, 0, 0))
        assert old.exists(), "others may still ask for what the epoch began with"
        for iteration in (1, 2):
            fresh.step(Generation(3, iteration))
        wait_until(lambda: not old.exists(), "its end, as nobody can ask for it any more")


def test_a_damaged_part_of_a_survivor_comes_back_into_its_slot(tmp_path):
    with cluster(tmp_path, 2) as running:
        members = begin(running)
        inventories = running.close(1)
        node, name = running.nodes[0], own_name(0, Seat(0, 0, 0))
        flip(node, name, FIRST, "shard")
        record = running.record(2, memory(inventories, FIRST, LAYOUTS))
        running.open(record)
        for member in members:
            member.check(record)
        assert node.seen(Kind.CORRUPTION)
        assert not (node.directory / copy_name(0)).exists()
        segment = Segment.open(node.directory / name, writable=False)
        held = [s for s in range(segment.slots) if segment.state(s) is SlotState.SEALED]
        assert [segment.generation(s) for s in held] == [FIRST]
        for member in members:
            assert member.wait(FIRST) == "committed"


def test_slots_of_another_model_do_not_describe_the_restored_role(tmp_path):
    """Its processes were here before, were refused, and have sealed nothing."""
    with cluster(tmp_path, 2) as running:
        begin(running)
        inventories = running.close(1)
        node = running.nodes[0]
        node.kill()
        # Before the others in the order in which a vault finds them.
        stranger = Seat(0, 0, 9)
        path = node.directory / own_name(0, stranger)
        Segment.create(path, make_layout(0, 5000), stranger, ())
        own = node.directory / own_name(0, Seat(0, 0, 0))
        own.rename(node.directory / own_name(0, Seat(0, 1, 0)))
        node.start()
        node.close_epoch(1)
        restore = memory(inventories, FIRST, LAYOUTS)
        record = running.record(2, restore, {0: Seat(0, 0, 10), 1: Seat(1, 0, 0)})
        running.open(record)
        wait_until((node.directory / own_name(0, Seat(0, 0, 10))).exists, "slots of the next one")
        Member(node, LAYOUTS[0], 2, incarnation=10).check(record)


@pytest.mark.parametrize(("share", "fits"), [(0.9, False), (1.1, True)])
def test_the_own_slots_are_all_that_a_restore_needs(tmp_path, share, fits):
    """One generation more was asked for when it came into a file of its own."""
    layouts = {role: make_layout(role, 1 << 20) for role in range(2)}
    limit = share * harness.segment_bytes(layouts[1])
    with cluster(tmp_path, 3, roles=2) as running:
        spare = running.nodes[2]
        spare.kill()
        spare.settings = replace(spare.settings, memory_gb=limit / 1e9)
        spare.start()
        begin(running, layouts)
        running.nodes[1].die()
        record = swap(running, running.close(1, gone={1}), FIRST, layouts)
        running.open(record)
        if fits:
            Member(spare, layouts[1], 2).check(record)
        else:
            with pytest.raises(errors.OutOfSpace, match="raise --deadpool-memory-gb"):
                Member(spare, layouts[1], 2)


def test_restored_parts_are_released_after_a_newer_commit(tmp_path):
    """A chain of steps lies in other files; while anybody holds it, its memory is not free."""
    state = slot_store.SlotStore(scheme_of, 0, tmp_path, Settings(), lambda _: None)
    seat = Seat(0, 0, 0)
    record = harness.record_of(2, restore=Restore("memory", FIRST))
    state.adopt(record)
    layout = LAYOUTS[0]
    segment = Segment.create(tmp_path / copy_name(0), layout, None, ("shard",))
    worker = RoleWorker(state, record, 0, seat)
    worker._outcome = {"a step": Place(segment, 0, "shard", 1, 0, 2)}
    held = weakref.ref(segment)
    del segment
    state.ledger.committed[0] = FIRST, "step"
    restore = worker._restore
    restore(layout)
    assert held() is not None, "it may have to be sent once more"
    state.ledger.committed[0] = Generation(2, FIRST.iteration + 1), "step"
    restore(layout)
    gc.collect()
    assert held() is None


NBYTES = 3 << 20


def _parked(directory: Path) -> list[Path]:
    return list(directory.glob(".parked-*"))


def test_the_slots_of_a_role_are_those_that_were_made_before_it_was_given(tmp_path):
    with cluster(tmp_path, 2) as running:
        spare = running.nodes[0]
        member = Member(spare, make_layout(0, nbytes=NBYTES, peers=(0, 1)))
        member.client.park(make_layout(7, nbytes=NBYTES))
        (made,) = _parked(spare.directory)
        taken = allocated_bytes(spare.directory)
        assert taken > 2 * NBYTES, "their memory is there"
        known = made.stat()
        running.open(running.record(1))
        member.client.register(member.layout, 1)
        other = Member(running.nodes[1], make_layout(1, nbytes=NBYTES, peers=(0, 1)), 1)
        assert (spare.directory / own_name(0, member.seat)).stat().st_ino == known.st_ino
        assert _parked(spare.directory) == []
        harness.train([member, other], Generation(1, 0))
        found = Segment.open(spare.directory / own_name(0, member.seat), writable=False)
        assert found.layout == member.layout


def test_a_role_of_another_size_gets_slots_of_its_own(tmp_path):
    with cluster(tmp_path, 1) as running:
        (node,) = running.nodes
        member = Member(node, make_layout(0, nbytes=64 << 10))
        member.client.park(make_layout(7, nbytes=NBYTES))
        running.open(running.record(1))
        member.client.register(member.layout, 1)
        member.write(Generation(1, 0))
        assert _parked(node.directory) == []
        assert allocated_bytes(node.directory) < NBYTES
