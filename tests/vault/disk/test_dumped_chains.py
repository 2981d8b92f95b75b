"""Dumps that are read, and such as hold parts as chains of gradients or in files of other roles."""

import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from deadpool_megatron.layout import history, records
from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.disk.dump import dump, dump_files, generation_name
from deadpool_megatron.vault.disk.sources import newest_whole, slots_of, snapshot_of_dump
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.restore import Restorer
from deadpool_megatron.vault.shm.segment import Segment, SlotState, checksum, dump_name, own_name
from deadpool_megatron.vault.shm.table import Place
from tests.vault.harness import make_layout, record_of
from tests.vault.slots import SlotStore, scheme_of

G = records.Generation
SHARDS = ("first", "second")
STEP = (records.UPDATE_PART, records.SUMS_PART, *map(records.gradients_part, SHARDS))
PARTS = (*SHARDS, *STEP, "extras@step")
SIZE = 64


def layout(role: int = 0, replicas: tuple[int, ...] = (0,)) -> records.RoleLayout:
    parts = tuple(
        records.PartInfo(name, SIZE, replicas if "@" not in name else (role,)) for name in PARTS
    )
    return records.RoleLayout(role, parts, replicas, 2, f"hash-{role}")


def write(
    directory: Path, node: int, slots: dict[int, set[str]], of: records.RoleLayout | None = None
) -> None:
    """A dump file with these parts of these iterations, the newest one in its first slot."""
    of = of or layout()
    directory.mkdir(parents=True, exist_ok=True)
    order = sorted(slots, reverse=True)
    dumped = Segment.create(directory / dump_name(of.role, node), of, None, (), len(order))
    for slot, iteration in enumerate(order):
        dumped.reserve(tuple(slots[iteration]), [slot])
        dumped.open_slot(slot, G(1, iteration), 1)
        for name in slots[iteration]:
            content = f"{of.role}.{node}.{iteration}.{name}".encode().ljust(SIZE)
            dumped.data(slot, name)[:] = content
            dumped.seal_part(slot, name, SIZE, checksum(memoryview(content)), 1)


# Whole copies and steps, most of them with all that belongs to them.
HELD = st.builds(
    lambda kept, lost: set(kept) - lost,
    st.sampled_from([(*SHARDS, "extras@step"), (*STEP, "extras@step"), PARTS]),
    st.sets(st.sampled_from(PARTS), max_size=1),
)
SLOTS = st.dictionaries(st.integers(1, 4), HELD, min_size=1, max_size=4)


@settings(suppress_health_check=list(HealthCheck))
@given(st.lists(SLOTS, min_size=1, max_size=2))
def test_parts_that_can_be_recomputed_count_as_held(files):
    """The files of two nodes are put together, and all that is recomputed begins at one base."""
    with tempfile.TemporaryDirectory() as name:
        held: dict[int, set[str]] = {}
        for node, slots in enumerate(files):
            write(Path(name) / generation_name(G(1, 4)), node, {4: set(), **slots})
            for iteration, parts in slots.items():
                held.setdefault(iteration, set()).update(parts)

        def base(shard: str) -> int:
            """The iteration to compute from; 0: there is none."""
            step, at = {records.UPDATE_PART, records.SUMS_PART, records.gradients_part(shard)}, 4
            while at and shard not in held.get(at, ()):
                at = at - 1 if step <= held.get(at, set()) else 0
            return at

        bases = {base(shard) for shard in SHARDS}
        whole = "extras@step" in held.get(4, ()) and 0 not in bases and len(bases - {4}) <= 1
        found, why_not = newest_whole(Path(name), range(1), {1: history.NO_LIMIT})
        assert (found is not None) is whole, why_not
        if found is not None:
            assert (found.generation, found.boundary) == (G(1, 4), "step")


def test_where_the_bytes_of_a_role_lie(tmp_path):
    """One part in its own file, one in that of a role that has the same bytes."""
    write(tmp_path, 5, {4: {"first", "extras@step"}}, layout(0, (0, 1)))
    write(tmp_path, 6, {4: {"second"}}, layout(1, (0, 1)))
    taken = snapshot_of_dump(tmp_path, 0, G(1, 4), "step")
    assert taken.path == str(tmp_path / "dump-0-5.seg")
    assert taken.elsewhere == {"second": str(tmp_path / "dump-1-6.seg")}
    for name, (offset, nbytes, digest) in taken.parts.items():
        content = Path(taken.elsewhere.get(name, taken.path)).read_bytes()[offset : offset + nbytes]
        assert checksum(memoryview(content)) == digest
        assert content.strip().endswith(name.encode())
    assert type(taken).from_dict(taken.to_dict()) == taken


def test_part_held_as_gradients_only_has_no_bytes(tmp_path):
    write(tmp_path, 5, {4: {"first", *STEP, "extras@step"}, 3: {"second"}})
    with pytest.raises(VaultError, match=r"part second of role 0 is not in .* as bytes"):
        snapshot_of_dump(tmp_path, 0, G(1, 4), "step")
    with pytest.raises(VaultError, match="nothing of role 1"):
        snapshot_of_dump(tmp_path, 1, G(1, 4), "step")


def test_slots_of_another_iteration_are_none_of_the_generation(tmp_path):
    """Those of the iterations before are, in the lineage of the generation."""
    write(tmp_path, 0, {5: set(PARTS), 6: set(PARTS)})
    (dumped,) = dump_files(tmp_path)
    assert list(slots_of(dumped, G(3, 6))) == [(0, G(3, 6)), (1, G(3, 5))]
    assert list(slots_of(dumped, G(3, 5))) == []


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


def test_a_file_that_was_not_written_is_not_named(writer, tmp_path, monkeypatch):
    """Nothing of the generation is intact, but something that leads to it."""
    (segment,) = writer.table.segments.values()
    segment.open_slot(1, Generation(1, 3), 1)
    segment.seal_part(1, "shard", 10, checksum(segment.data(1, "shard", 10)), 1)
    for name in NAMES:
        segment.data(0, name)[0] ^= 0xFF
    led = [(Generation(1, 3), "shard")]
    monkeypatch.setattr("deadpool_megatron.vault.disk.dump._steps_to_missing", lambda *_: led)
    assert dump(writer, tmp_path / "dump", GENERATION, "step") == []
    assert not list((tmp_path / "dump").iterdir())
