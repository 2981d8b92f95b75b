"""Bytes that turn out to be damaged when the state is dumped are not passed over in silence."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deadpool_megatron.layout import records
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.disk.dump import damaged_parts, dump
from deadpool_megatron.vault.disk.sources import newest_whole
from deadpool_megatron.vault.shm.segment import PartState, Segment, checksum, copy_name
from tests.vault.harness import Cluster, cluster, make_layout
from tests.vault.protected import begin
from tests.vault.slots import SlotStore, scheme_of

G = records.Generation
LAYOUT = records.RoleLayout(
    0, tuple(records.PartInfo(n, 64, (0,)) for n in ("shard", "extras@step")), (0,), 2, "h"
)


@contextmanager
def half_lost(directory: Path) -> Iterator[Cluster]:
    """Two nodes of which one is gone after three iterations; the epoch is closed, and of role 1
    there is only what its buddy holds."""
    directory.mkdir()
    layouts = {role: make_layout(role, peers=(0, 1)) for role in range(2)}
    with cluster(directory, 2) as running:
        begin(running, layouts, last=2)
        running.nodes[1].die()
        running.close(1, gone={1})
        yield running


def strike(segment: Segment, generation: records.Generation, name: str) -> None:
    """One bit, after it was promised."""
    (slot,) = (one for one in range(segment.slots) if segment.generation(one) == generation)
    segment.data(slot, name)[5] ^= 1


def vault(directory: Path, slots: dict[int, tuple[str, ...]]) -> SlotStore:
    """Of a closed epoch; a copy of role 0 with these parts of these iterations."""
    directory.mkdir()
    state = SlotStore(scheme_of, 3, directory, Settings(), lambda _: None)
    names = sorted({name for parts in slots.values() for name in parts})
    segment = Segment.create(directory / copy_name(0), LAYOUT, None, names, len(slots))
    for slot, (iteration, parts) in enumerate(slots.items()):
        segment.open_slot(slot, G(1, iteration), 1)
        for name in parts:
            segment.data(slot, name)[:] = f"{iteration} {name}".encode().ljust(64)
            segment.seal_part(slot, name, 64, checksum(segment.data(slot, name)), 1)
    state.table.scan()
    state.close(1)
    return state


def test_damage_is_reported_and_the_previous_dump_is_whole(tmp_path):
    base = tmp_path / "dump"
    with half_lost(tmp_path / "run") as running:
        node = running.nodes[0]
        strike(Segment.open(node.directory / "copy-1.seg"), G(1, 2), "shard")
        told = [[1, [1, 2], "shard"]]
        for _ in range(2):  # the next coordinator may ask again for what is known to be bad by then
            assert node.dump(base / "1-2", G(1, 2), "step")["damaged"] == told
        assert newest_whole(base, range(2), {1: NO_LIMIT})[0] is None
        node.dump(base / "1-1", G(1, 1), "step")
    found, why_not = newest_whole(base, range(2), {1: NO_LIMIT})
    assert found == records.Restore("dump", G(1, 1), "step", str(base / "1-1"))
    assert why_not == ["generation 1:2 lacks part shard of role 1"]


def test_dump_reports_a_role_without_intact_parts(tmp_path):
    """There is no file of it, and the second time nothing is held of it either."""
    state = vault(tmp_path / "node", {4: ("shard", "extras@step")})
    (segment,) = state.table.segments.values()
    for name in ("shard", "extras@step"):
        strike(segment, G(1, 4), name)
    for _ in range(2):
        assert dump(state, tmp_path / "dump", G(1, 4), "step") == []
        assert {one.part for one in damaged_parts(state)} == {"shard", "extras@step"}


def test_dump_reports_no_damage_with_other_bytes_on_the_node(tmp_path):
    state = vault(tmp_path / "node", {4: ("shard", "extras@step")})
    (segment,) = state.table.segments.values()
    twin = Segment.create(tmp_path / "node" / "copy-0-twin", LAYOUT, None, ("shard",), 1)
    twin.open_slot(0, G(1, 4), 1)
    twin.data(0, "shard")[:] = segment.data(0, "shard")
    twin.seal_part(0, "shard", 64, checksum(twin.data(0, "shard")), 1)
    state = SlotStore(scheme_of, 3, tmp_path / "node", Settings(), lambda _: None)
    state.table.scan()
    state.table.segments["twin"] = twin
    strike(segment, G(1, 4), "shard")
    assert len(dump(state, tmp_path / "dump" / "1-4", G(1, 4), "step")) == 1
    assert damaged_parts(state) == []
    assert newest_whole(tmp_path / "dump", range(1), {1: NO_LIMIT})[0] is not None


def test_a_file_that_has_more_than_memory_has_by_now_keeps_it(tmp_path):
    """As of a salvage that was killed while it gave the memory back, and is begun again."""
    whole = ("shard", "extras@step")
    state = vault(tmp_path / "node", {3: whole, 4: whole})
    dump(state, tmp_path / "dump" / "1-4", G(1, 4), "step")
    (segment,) = state.table.segments.values()
    strike(segment, G(1, 4), "shard")
    dump(state, tmp_path / "dump" / "1-4", G(1, 4), "step")
    (path,) = (tmp_path / "dump" / "1-4").iterdir()
    dumped = Segment.open(path, writable=False)
    entry = dumped.entry(0, "shard")
    assert entry.state is PartState.SEALED
    assert bytes(dumped.data(0, "shard")) == b"4 shard".ljust(64)
    assert entry.checksum == checksum(dumped.data(0, "shard"))


def test_bytes_of_a_file_that_are_damaged_as_well_are_not_kept(tmp_path):
    state = vault(tmp_path / "node", {4: ("shard", "extras@step")})
    dump(state, tmp_path / "dump" / "1-4", G(1, 4), "step")
    (path,) = (tmp_path / "dump" / "1-4").iterdir()
    strike(Segment.open(path), G(1, 4), "shard")
    (segment,) = state.table.segments.values()
    strike(segment, G(1, 4), "shard")
    dump(state, tmp_path / "dump" / "1-4", G(1, 4), "step")
    assert Segment.open(path, writable=False).entry(0, "shard").state is PartState.ABSENT
