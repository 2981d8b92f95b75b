"""Each look at bytes that come from elsewhere, or lie here, by itself: nothing else stands behind
it. A part that fails is never sealed."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.layout import records
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import errors, slot_memory, slot_store
from deadpool_megatron.vault.disk.dump import dump
from deadpool_megatron.vault.peer_server import Server
from deadpool_megatron.vault.restore import Restorer
from deadpool_megatron.vault.schemes.registry import scheme_of
from deadpool_megatron.vault.shm.segment import PartState, Segment, checksum
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import content, make_layout, record_of

LAYOUT = make_layout(0, nbytes=5000, replicas=(0, 1))
EXTRAS, SHARDS = ["extras@step"], ["shard", "tail"]
BASE, RESTORED = records.Generation(1, 3), records.Generation(1, 4)


def keep(
    segment: Segment, names: list[str], generation: records.Generation = RESTORED, slot: int = 0
) -> Segment:
    """Seal parts of a generation in a slot of a copy."""
    segment.reserve(names, [slot])
    segment.open_slot(slot, generation, 1)
    for name in names:
        view = segment.data(slot, name)
        view[:] = content(0, generation, name, len(view))
        segment.seal_part(slot, name, len(view), checksum(view), 1)
    return segment


class House:
    """The vaults of three nodes. Role 0 has moved to node 0, and is restored there."""

    def __init__(self, directory: Path) -> None:
        self.network = FakeNetwork()
        self.states, self.servers = list[slot_store.SlotStore](), list[Server]()
        for node in range(3):
            folder = directory / f"node{node}"
            folder.mkdir()
            settings = Settings(restore_seconds=5.0, chunk_bytes=4096)
            transport = self.network.transport("fake", node, 5.0)
            about = folder, settings, lambda _: None, transport
            self.states.append(slot_store.SlotStore(scheme_of, node, *about))
            self.servers.append(Server(self.states[node], transport))
            self.servers[node].start()

    def keep(self, node: int, names: list[str], layout: records.RoleLayout = LAYOUT) -> Segment:
        """A sealed copy on a node."""
        return keep(slot_memory.ensure_copy(self.states[node], layout, BASE), names)

    def obtainer(self, restore: records.Restore | None = None, late: bool = False) -> Restorer:
        """Of epoch 2; ``late``: others hear of it when node 0 has asked one once in vain."""
        places = (records.Source(1, 0), records.Source(1, 1), records.Source(2, 0))
        listed = dict.fromkeys((*EXTRAS, *SHARDS), places)
        restore = restore or records.Restore("memory", RESTORED, sources={0: listed})
        record = record_of(2, count=3, restore=restore)
        for state in self.states:
            state.close(1)
        for state in self.states[: 1 if late else 3]:
            state.adopt(record)
        obtainer = Restorer(self.states[0], record, 0)
        if late:
            pause = self.states[0].gate.pause

            def adopt_and_pause(epoch: int, seconds: float) -> None:
                self.states[1].adopt(record)
                pause(epoch, seconds)

            self.states[0].gate.pause = adopt_and_pause  # type: ignore[method-assign]
        return obtainer

    def obtain(self, restore: records.Restore | None = None, late: bool = False) -> None:
        """Every part comes, as it was written."""
        places = self.obtainer(restore, late).obtain(LAYOUT)
        for name, place in places.items():
            assert bytes(place.view) == content(0, RESTORED, name, place.nbytes), name

    def dumped(self, directory: Path, role: int) -> tuple[Path, records.Restore]:
        """All nodes write what they hold, and forget it; the file of a role, and what reads it."""
        for state in self.states:
            dump(state, directory, RESTORED, "step")
            for segment in list(state.table.segments.values()):
                state.table.remove(segment)
        (path,) = directory.glob(f"dump-{role}-*.seg")
        return path, records.Restore("dump", RESTORED, path=str(directory))

    def refuse(self, match: str, restore: records.Restore | None = None) -> None:
        with pytest.raises(errors.RestoreUnavailable, match=match):
            self.obtainer(restore).obtain(LAYOUT)
        found = self.states[0].table.find(0, RESTORED, "shard")
        assert not [place for place in found if place.segment.seat is not None]


@pytest.fixture
def house(tmp_path):
    house = House(tmp_path)
    yield house
    for server in house.servers:
        server.stop()


def test_a_copy_on_the_own_node_is_held_against_its_checksum(house):
    copy = house.keep(0, [*EXTRAS, *SHARDS])
    copy.data(0, "shard")[5] ^= 1
    house.refuse("shard")


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("fault", ["damaged", "away"])
def test_a_source_that_fails_falls_to_the_next(house, fault, left):
    house.states[0].settings = Settings(restore_seconds=0.1, chunk_bytes=4096)
    copy = house.keep(1, [*EXTRAS, *SHARDS])
    if left:
        house.keep(1, [*EXTRAS, *SHARDS], replace(LAYOUT, role=1))
        house.keep(2, [*EXTRAS, *SHARDS])
    if fault == "damaged":
        copy.data(0, "shard")[5] ^= 1
    else:
        house.network.cut.add(("fake", 1))
    if left:
        house.obtain()
    else:
        house.refuse("checksum does not match" if fault == "damaged" else "nobody listens")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_dump_is_held_against_its_checksums(house, tmp_path, damaged):
    house.keep(0, [*EXTRAS, *SHARDS])
    path, restore = house.dumped(tmp_path / "dump", 0)
    if damaged:
        Segment.open(path).data(0, "shard")[5] ^= 1
        house.refuse("checksum does not match", restore)
    else:
        house.obtain(restore)


def test_bytes_of_another_model_on_the_own_node_are_nothing(house):
    house.keep(0, [*EXTRAS, *SHARDS], replace(LAYOUT, layout_hash="other"))
    house.refuse("extras@step")


def test_restore_refuses_a_part_larger_than_its_place(house):
    larger = replace(LAYOUT.parts[0], nbytes=LAYOUT.parts[0].nbytes + 1)
    house.keep(0, [*EXTRAS, "tail"])
    house.keep(1, SHARDS, replace(LAYOUT, parts=(larger, *LAYOUT.parts[1:])))
    house.refuse("5001 bytes does not fit")


def test_restore_retries_a_source_that_has_not_adopted_the_epoch(house):
    house.keep(1, [*EXTRAS, *SHARDS])
    house.obtain(late=True)


def test_restore_checks_bytes_of_peers_by_the_owners_checksums(house):
    """Both are sealed, but this node knows what the role itself had."""
    copy = house.keep(0, [*EXTRAS, "tail"])
    copy.seal_part(0, "shard", 5000, checksum(memoryview(b"other bytes")), 1, PartState.ELSEWHERE)
    house.keep(1, SHARDS, replace(LAYOUT, role=1))
    house.refuse("not the bytes that the role had")


def test_restore_reads_no_answer_from_bytes_of_a_refused_part(house):
    """The source that offers other bytes sends them at once; the same node has the right ones of a
    peer. A node that cannot be understood gets no second try here."""
    house.states[0].settings = Settings(restore_seconds=1e-9, chunk_bytes=4096)
    right = checksum(memoryview(content(0, RESTORED, "shard", 5000)))
    copy = house.keep(0, [*EXTRAS, "tail"])
    copy.seal_part(0, "shard", 5000, right, 1, PartState.ELSEWHERE)
    other = house.keep(1, SHARDS)
    other.data(0, "shard")[5] ^= 1
    other.seal_part(0, "shard", 5000, checksum(other.data(0, "shard")), 1)
    house.keep(1, SHARDS, replace(LAYOUT, role=1))
    house.network.cut.add(("fake", 2))
    house.obtain()


def test_a_moment_without_descriptors_is_sat_out_while_a_dump_is_read(house, tmp_path, monkeypatch):
    """It says nothing of the disk that the dump is on."""
    house.keep(0, [*EXTRAS, *SHARDS])
    _, restore = house.dumped(tmp_path / "dump", 0)
    lacking, ensure_own = [errno.EMFILE, errno.ENFILE], slot_memory.ensure_own

    def ensure_or_not(*args: Any, **more: Any) -> Segment:
        if lacking:
            raise OSError(lacking[-1], os.strerror(lacking.pop()))
        return ensure_own(*args, **more)

    monkeypatch.setattr(slot_memory, "ensure_own", ensure_or_not)
    house.obtain(restore)
    assert not lacking


@pytest.mark.parametrize("nbytes", [5000, 5001])
def test_dump_of_a_peer_gives_parts_of_the_same_size_only(house, tmp_path, nbytes):
    """Its own has the extras alone."""
    house.keep(0, EXTRAS)
    shard = replace(LAYOUT.parts[0], nbytes=nbytes)
    peer = replace(LAYOUT, role=1, parts=(shard, *LAYOUT.parts[1:]), layout_hash="of role 1")
    house.keep(1, SHARDS, peer)
    _, restore = house.dumped(tmp_path / "dump", 1)
    if nbytes == 5000:
        house.obtain(restore)
    else:
        house.refuse("other parameters", restore)
