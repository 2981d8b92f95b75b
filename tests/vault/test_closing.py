"""Epochs that are closed while members write and vaults fetch."""

import os
import signal
import threading
import time
from operator import le
from pathlib import Path

import pytest

from deadpool_megatron.layout.records import Generation, Inventory, Seat
from deadpool_megatron.vault.errors import Frozen, Interrupted
from deadpool_megatron.vault.shm.segment import Segment, SlotState
from tests.vault.harness import Member, Node, cluster, make_layout, memory, wait_until
from tests.vault.protected import FIRST, LAYOUTS, begin, swap


def train(member: Member, last: Generation, everybody: threading.Barrier) -> None:
    """Iterate until the epoch is closed; the collective that spans all roles is a barrier here."""
    generation = last
    while True:
        generation = Generation(generation.lineage, generation.iteration + 1)
        try:
            member.write(generation)
            if member.wait(generation) == "interrupted":
                everybody.abort()
                return
            everybody.wait(10)
        except (Frozen, threading.BrokenBarrierError):
            everybody.abort()
            return


def newest_common(inventories: dict[int, Inventory], roles: int) -> Generation:
    """The planner's choice, from frozen inventories only."""
    whole = {
        (h.role, h.generation)
        for inventory in inventories.values()
        for h in inventory.holdings
        if h.parts >= {"shard", "tail", "extras@step"}
    }
    return max(g for _, g in whole if all((role, g) in whole for role in range(roles)))


@pytest.mark.slow
def test_closing_races_with_a_busy_member(tmp_path):
    """Whatever the members are in the middle of: the inventory is stable, and the newest common
    generation of it restores byte for byte. Ten times, at arbitrary moments; no thread and no
    descriptor stays behind."""
    layouts = {role: make_layout(role, 300_000) for role in range(2)}
    with cluster(tmp_path, 2) as running:
        members = begin(running, layouts)
        kept = FIRST
        sizes = []
        for epoch in range(1, 11):
            everybody = threading.Barrier(len(members))
            threads = [
                threading.Thread(
                    target=train, args=(member, Generation(epoch, kept.iteration), everybody)
                )
                for member in members
            ]
            for thread in threads:
                thread.start()
            time.sleep(0.02 + 0.007 * epoch)  # an arbitrary moment, not a wait for anything
            inventories = running.close(epoch)
            for member in members:
                os.eventfd_write(member.interrupt, 1)
            for thread in threads:
                thread.join(10)
                assert not thread.is_alive()
            assert inventories == {node.number: node.inventory() for node in running.nodes}
            for member in members:
                os.eventfd_read(member.interrupt)
            kept = newest_common(inventories, len(members))
            record = running.record(epoch + 1, memory(inventories, kept, layouts))
            running.open(record)
            for member in members:
                member.check(record)
            for member in members:
                assert member.wait(kept) == "committed"
            sizes.append([threads_and_descriptors(node) for node in running.nodes])
        assert kept.iteration > 0
        for index, node in enumerate(running.nodes):
            most = tuple(map(max, zip(*(each[index] for each in sizes[:5]), strict=True)))
            wait_until(
                lambda node=node, most=most: all(map(le, threads_and_descriptors(node), most)),
                f"vault {node.number} to have no more threads and descriptors than in five epochs",
            )


def threads_and_descriptors(node: Node) -> tuple[int, int]:
    """How many of each its vault has."""
    base = Path(f"/proc/{node.process.pid}")
    return len(list((base / "task").iterdir())), len(list((base / "fd").iterdir()))


def test_a_restore_is_interrupted_by_the_next_failure(tmp_path):
    """The only source does not answer; the member hears the interrupt, the vault moves on."""
    with cluster(tmp_path, 3, roles=2) as running:
        begin(running)
        running.nodes[1].die()
        inventories = running.close(1, gone={1})
        record = swap(running, inventories, FIRST)
        running.nodes[0].send_signal(signal.SIGSTOP)
        running.nodes[2].adopt(record)
        fresh = Member(running.nodes[2], LAYOUTS[1], 2)
        timer = threading.Timer(0.3, os.eventfd_write, (fresh.interrupt, 1))
        timer.start()
        with pytest.raises(Interrupted):
            fresh.restore(record)
        os.eventfd_read(fresh.interrupt)
        started = time.monotonic()
        running.nodes[2].close_epoch(2)
        assert time.monotonic() - started < 2
        running.nodes[0].send_signal(signal.SIGCONT)
        running.nodes[0].close_epoch(2)
        inventories = {0: running.nodes[0].inventory(), 2: running.nodes[2].inventory()}
        record = swap(running, inventories, FIRST, epoch=3)
        running.open(record)
        fresh.check(record)


def test_a_member_stopped_while_it_takes_a_slot_sees_the_epoch_that_came_meanwhile(
    tmp_path, monkeypatch
):
    """A vault promises the slot, opens the next epoch and lets the member write again, all between
    the member's store and its second look: the slot is not the member's."""
    layouts = {role: make_layout(role) for role in range(2)}
    with cluster(tmp_path, 2) as running:
        members = begin(running, layouts, last=2)
        mark_writing = Segment.mark_writing
        marked: list[tuple[Segment, int]] = []

        def stopped(segment: Segment, slot: int) -> SlotState:
            before = mark_writing(segment, slot)
            if segment.seat == Seat(0, 0, 0) and not marked:
                marked.append((segment, slot))
                # The vault had read the states before the store became visible to it.
                segment.set_state(slot, before)
                inventories = running.close(1)
                mark_writing(segment, slot)
                held = inventories[0].holdings
                kept = min(h.generation for h in held if h.role == 0)
                running.open(running.record(2, memory(inventories, kept, layouts)))
            return before

        monkeypatch.setattr(Segment, "mark_writing", stopped)
        with pytest.raises(Frozen):
            members[0].client.begin(Generation(1, 3), 1)
        ((segment, slot),) = marked
        assert segment.state(slot) is SlotState.SEALED
        assert segment.generation(slot) < Generation(1, 3)
