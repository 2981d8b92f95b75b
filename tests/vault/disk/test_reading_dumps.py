"""A vault restores from the files of a dump, whose file system may be slow or away."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deadpool_megatron.layout.records import EpochRecord, Generation, Restore, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.disk.dump import dump
from deadpool_megatron.vault.epoch_gate import VaultState
from deadpool_megatron.vault.restore import Restorer
from deadpool_megatron.vault.shm.segment import Segment, SlotState, checksum, own_name
from deadpool_megatron.vault.shm.table import Place
from tests.vault.harness import make_layout, record_of

LAYOUT = make_layout(0, nbytes=100)
NAMES = ["shard", "tail", "extras@step"]
GENERATION = Generation(1, 4)
SEAT = Seat(0, 0, 0)


def _vault(directory: Path, record: EpochRecord) -> VaultState:
    directory.mkdir()
    state = VaultState(0, directory, Settings(), lambda _: None)
    state.adopt(record)
    return state


@pytest.fixture
def writer(tmp_path: Path) -> VaultState:
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


def _from_dump(writer: VaultState, tmp_path: Path) -> Restore:
    dump(writer, tmp_path / "dump", GENERATION, "step")
    return Restore("dump", GENERATION, path=str(tmp_path / "dump"))


def test_a_part_is_read_when_a_slot_is_free(writer: VaultState, tmp_path: Path) -> None:
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


def test_a_file_that_was_not_written_is_not_named(
    writer: VaultState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the generation is intact, but something that leads to it."""
    (segment,) = writer.table.segments.values()
    segment.open_slot(1, Generation(1, 3), 1)
    segment.seal_part(1, "shard", 10, checksum(segment.data(1, "shard", 10)), 1)
    for name in NAMES:
        segment.data(0, name)[0] ^= 0xFF
    led = [(Generation(1, 3), "shard")]
    monkeypatch.setattr("deadpool_megatron.vault.disk.dump._led_from", lambda *_: led)
    assert dump(writer, tmp_path / "dump", GENERATION, "step") == []
    assert not list((tmp_path / "dump").iterdir())
