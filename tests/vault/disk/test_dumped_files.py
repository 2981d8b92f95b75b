"""Dumps that are read, and such as hold parts in files of other nodes or roles."""

import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from deadpool_megatron.layout import history, records
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.disk.dump import dump, generation_name
from deadpool_megatron.vault.disk.sources import dumped_parts, newest_whole, snapshot_of_dump
from deadpool_megatron.vault.errors import RestoreUnavailable, VaultError
from deadpool_megatron.vault.restore import Restorer
from deadpool_megatron.vault.shm.segment import Segment, SlotState, checksum, dump_name, own_name
from deadpool_megatron.vault.shm.table import Place
from tests.vault.harness import make_layout, record_of
from tests.vault.slots import SlotStore, scheme_of

G = records.Generation
SHARDS = ("first", "second")
PARTS = (*SHARDS, "extras@step")
SIZE = 64


def layout(role: int = 0, replicas: tuple[int, ...] = (0,)) -> records.RoleLayout:
    parts = tuple(
        records.PartInfo(name, SIZE, replicas if "@" not in name else (role,)) for name in PARTS
    )
    return records.RoleLayout(role, parts, replicas, 2, f"hash-{role}")


def write(
    directory: Path,
    node: int,
    iteration: int,
    names: set[str],
    of: records.RoleLayout | None = None,
) -> None:
    """A dump file with these parts of an iteration."""
    of = of or layout()
    directory.mkdir(parents=True, exist_ok=True)
    dumped = Segment.create(directory / dump_name(of.role, node), of, None, names, 1)
    dumped.open_slot(0, G(1, iteration), 1)
    for name in names:
        content = f"{of.role}.{node}.{iteration}.{name}".encode().ljust(SIZE)
        dumped.data(0, name)[:] = content
        dumped.seal_part(0, name, SIZE, checksum(memoryview(content)), 1)


HELD = st.sets(st.sampled_from(PARTS), min_size=1)


@settings(suppress_health_check=list(HealthCheck))
@given(st.lists(HELD, min_size=1, max_size=3))
def test_files_of_several_nodes_complete_each_other(files):
    with tempfile.TemporaryDirectory() as name:
        for node, parts in enumerate(files):
            write(Path(name) / generation_name(G(1, 4)), node, 4, parts)
        found, why_not = newest_whole(Path(name), range(1), {1: history.NO_LIMIT})
        assert (found is not None) is (set(PARTS) <= set().union(*files)), why_not
        if found is not None:
            assert (found.generation, found.boundary) == (G(1, 4), "step")


def test_where_the_bytes_of_a_role_lie(tmp_path):
    """One part in its own file, one in that of a role that has the same bytes."""
    write(tmp_path, 5, 4, {"first", "extras@step"}, layout(0, (0, 1)))
    write(tmp_path, 6, 4, {"second"}, layout(1, (0, 1)))
    taken = snapshot_of_dump(tmp_path, 0, G(1, 4), "step")
    assert taken.path == str(tmp_path / "dump-0-5.seg")
    assert taken.elsewhere == {"second": str(tmp_path / "dump-1-6.seg")}
    for name, (offset, nbytes, digest) in taken.parts.items():
        content = Path(taken.elsewhere.get(name, taken.path)).read_bytes()[offset : offset + nbytes]
        assert checksum(memoryview(content)) == digest
        assert content.strip().endswith(name.encode())
    assert type(taken).from_dict(taken.to_dict()) == taken


def test_part_without_bytes_has_no_place(tmp_path):
    write(tmp_path, 5, 4, {"first", "extras@step"})
    with pytest.raises(VaultError, match=r"part second of role 0 is not in .* as bytes"):
        snapshot_of_dump(tmp_path, 0, G(1, 4), "step")
    with pytest.raises(VaultError, match="nothing of role 1"):
        snapshot_of_dump(tmp_path, 1, G(1, 4), "step")


def test_parts_of_another_iteration_are_not_of_the_generation(tmp_path):
    """Those of its own iteration are, in any lineage."""
    write(tmp_path, 0, 6, set(PARTS))
    for wanted in (G(3, 6), G(3, 5)):
        found = dumped_parts(tmp_path, wanted, range(1)).generations
        assert found == ({wanted} if wanted.iteration == 6 else set())


LAYOUT = make_layout(0, nbytes=100)
NAMES = ["shard", "tail", "extras@step"]
GENERATION = Generation(1, 4)
SEAT = Seat(0, 0, 0)


def _vault(directory: Path, record: EpochRecord) -> SlotStore:
    directory.mkdir()
    state = SlotStore(scheme_of, 0, directory, Settings(), lambda _: None)
    state.adopt(record)
    return state


@pytest.fixture
def writer(tmp_path):
    """A vault of a closed epoch that holds the generation."""
    state = _vault(tmp_path / "before", record_of())
    path = tmp_path / "before" / own_name(0, SEAT)
    segment = Segment.create(path, LAYOUT, SEAT, NAMES)
    state.table.segments[path.name] = segment
    segment.open_slot(0, GENERATION, 1)
    for name in NAMES:
        segment.seal_part(0, name, 10, checksum(segment.data(0, name, 10)), 1)
    assert segment.state(0) is SlotState.SEALED
    state.close(1)
    return state


def _from_dump(writer: SlotStore, tmp_path: Path) -> Restore:
    dump(writer, tmp_path / "dump", GENERATION, "step")
    return Restore("dump", GENERATION, path=str(tmp_path / "dump"))


def test_a_part_is_read_when_a_slot_is_free(writer, tmp_path):
    """A thread of the epoch before stands in a read of a slow disk, and has the slot."""
    restore = _from_dump(writer, tmp_path)
    record = record_of(2, restore=restore)
    state = _vault(tmp_path / "after", record)
    with Restorer(state, record, 0)._target(LAYOUT):
        state.close(2)
        record = record_of(3, restore=restore)
        state.adopt(record)
        found: list[dict[str, Place]] = []
        obtainer = Restorer(state, record, 0)
        restoring = threading.Thread(target=lambda: found.append(obtainer.obtain(LAYOUT)))
        restoring.start()
        restoring.join(0.5)
        assert restoring.is_alive(), "it waits"
    restoring.join(20)
    (places,) = found
    assert {place.name for place in places.values()} == set(NAMES)


def test_a_file_that_was_not_written_is_not_named(writer, tmp_path):
    """Nothing of the generation is intact."""
    (segment,) = writer.table.segments.values()
    for name in NAMES:
        segment.data(0, name)[0] ^= 0xFF
    assert dump(writer, tmp_path / "dump", GENERATION, "step") == []
    assert not list((tmp_path / "dump").iterdir())


def test_a_role_reads_the_files_of_others_only_for_a_part_that_its_own_lack(
    writer, tmp_path, monkeypatch
):
    """Of the thousands of a large run, on shared storage."""
    record = record_of(2, restore=_from_dump(writer, tmp_path))
    for role in range(1, 20):
        write(tmp_path / "dump", role, GENERATION.iteration, set(PARTS), layout(role))
    opened, usual = [], Segment.open
    monkeypatch.setattr(
        Segment, "open", lambda path, **how: opened.append(path) or usual(path, **how)
    )
    own = tmp_path / "dump" / dump_name(0, 0)
    Restorer(_vault(tmp_path / "whole", record), record, 0).obtain(LAYOUT)
    assert {path for path in opened if path.parent == own.parent} == {own}
    own.unlink()
    with pytest.raises(RestoreUnavailable):
        Restorer(_vault(tmp_path / "lacking", record), record, 0).obtain(LAYOUT)
    assert len({path for path in opened if path.parent == own.parent}) == 20
