"""A generation is set aside beside the slots: whole and proven, or not at all; nobody waits."""

import asyncio
import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.disk import pinned_snapshot as taking
from deadpool_megatron.vault.disk.pinned_snapshot import Snapshot, drop_snapshots
from deadpool_megatron.vault.errors import TooLate, VaultError
from deadpool_megatron.vault.shm.segment import Segment, checksum, copy_name
from deadpool_megatron.vault.shm.table import Place
from tests.vault import harness
from tests.vault.slots import SlotStore, scheme_of


def order(
    node: harness.Node, iteration: int, seconds: float = harness.DEADLINE
) -> Future[list[Snapshot]]:
    """Have the vault take an iteration; the answer comes later."""
    taking = node.control.take("test", iteration, seconds)
    return asyncio.run_coroutine_threadsafe(taking, node.loop.loop)


def two_members(running: harness.Cluster) -> list[harness.Member]:
    """The members of two roles, in epoch 1."""
    return running.join({role: harness.make_layout(role) for role in range(2)})


def steps(members: list[harness.Member], iterations: range) -> None:
    harness.train(members, *(Generation(1, iteration) for iteration in iterations))


def read(taken: Snapshot) -> Mapping[str, bytes]:
    """What is in its file."""
    whole = Path(taken.path).read_bytes()
    return {name: whole[start : start + n] for name, (start, n, _) in taken.parts.items()}


def left(node: harness.Node) -> list[str]:
    """Files of generations that were set aside."""
    return [path.name for path in node.directory.glob("taken-*")]


@pytest.mark.parametrize("is_last", [False, True])
def test_a_generation_is_taken_with_its_last_extras(tmp_path, is_last):
    """None come any more when another generation follows, or the members say that none does."""
    with harness.cluster(tmp_path, 2) as running:
        members = two_members(running)
        taking = [order(node, 2) for node in running.nodes]
        steps(members, range(3))
        for member in members:
            member.append(Generation(1, 2), "evaluation")
            assert member.wait(Generation(1, 2), "evaluation") == "committed"
        assert not any(one.done() for one in taking), "more extras could follow"
        if is_last:
            for member in members:
                member.client.report_end()
        else:
            steps(members, range(3, 6))
        for role, one in enumerate(taking):
            (taken,) = one.result(harness.DEADLINE)
            assert (taken.role, taken.generation) == (role, Generation(1, 2))
            assert taken.boundary == "evaluation"
            found = read(taken)
            assert set(found) == {"shard", "tail", "extras@evaluation"}
            for name, data in found.items():
                assert data == harness.content(role, Generation(1, 2), name, len(data)), name
        drop_snapshots(running.nodes[0].directory)
        assert left(running.nodes[0]) == []


def test_snapshot_refuses_an_overwritten_slot(tmp_path):
    with harness.cluster(tmp_path, 2) as running:
        members = two_members(running)
        steps(members, range(5))
        with pytest.raises(TooLate, match="was overwritten"):
            order(running.nodes[0], 1).result(harness.DEADLINE)
        assert left(running.nodes[0]) == []


def test_a_close_ends_it(tmp_path):
    with harness.cluster(tmp_path, 2) as running:
        members = two_members(running)
        taking = order(running.nodes[0], 3)
        steps(members, range(4))
        running.close(1)
        with pytest.raises(VaultError, match="epoch 1 was closed"):
            taking.result(harness.DEADLINE)
        assert left(running.nodes[0]) == []


def test_snapshot_without_memory_is_refused_and_training_continues(tmp_path):
    full = {"id": "full", "point": "persist.reserve", "action": "mark"}
    with harness.cluster(tmp_path, 2, faults=[full]) as running:
        members = two_members(running)
        taking = order(running.nodes[0], 2)
        with pytest.raises(VaultError, match=r"no room .* role 0: \d+ bytes needed on "):
            taking.result(harness.DEADLINE)
        steps(members, range(4))
        assert left(running.nodes[0]) == []


def test_dropped_snapshot_ends_its_copy_at_once(tmp_path):
    with harness.cluster(tmp_path, 2) as running:
        members = two_members(running)
        steps(members, range(2))
        taking = order(running.nodes[0], 7)
        harness.wait_until(lambda: left(running.nodes[0]), "a file")
        assert list(running.nodes[0].status()["segments"])[-1] == "taken-test-0"
        drop_snapshots(running.nodes[0].directory, "test")
        with pytest.raises(VaultError, match="it was dropped"):
            taking.result(harness.DEADLINE)
        steps(members, range(2, 4))


def test_it_ends_with_its_deadline(tmp_path):
    with harness.cluster(tmp_path, 2) as running:
        members = two_members(running)
        steps(members, range(2))
        with pytest.raises(VaultError, match="waited too long for iteration 7"):
            order(running.nodes[0], 7, seconds=0.1).result(harness.DEADLINE)


def test_snapshot_is_checked_by_its_written_bytes(tmp_path, monkeypatch):
    """Not what was read before: the bytes go from the slot to the file, and are hashed there."""
    layout = harness.make_layout(0, nbytes=100_000)
    state = SlotStore(scheme_of, 0, tmp_path, Settings(), lambda _: None)
    segment = Segment.create(tmp_path / copy_name(0), layout, None, ("shard",))
    segment.open_slot(0, Generation(1, 1), 1)
    segment.data(0, "shard")[:] = harness.content(0, Generation(1, 1), "shard", 100_000)
    place = Place(segment, 0, "shard", 100_000, checksum(segment.data(0, "shard")), 1)
    taker = taking._SnapshotCopier(state, "test", Generation(1, 1), 0)
    state.table.segments[segment.path.name] = segment
    taker.reserve(0.0)
    copy = taker._copy
    copy(place)
    assert taker.path.read_bytes()[:100_000] == bytes(place.view)

    def spoil(file: int, data: memoryview, position: int) -> int:
        return written(file, bytes(len(data)), position)

    written = os.pwrite
    monkeypatch.setattr(taking.os, "pwrite", spoil)
    with pytest.raises(TooLate):
        copy(place)
    taker.close()
