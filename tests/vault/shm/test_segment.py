"""The slot file: what a reader finds after its writer was killed at any store."""

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash
from hypothesis import example, given, settings, strategies as st

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.agent_orders import Vault
from deadpool_megatron.vault.disk.dump import found_slots
from deadpool_megatron.vault.errors import SegmentError, VaultError
from deadpool_megatron.vault.shm import segment as segments
from deadpool_megatron.vault.shm.segment import (
    ENTRIES,
    PartState,
    Segment,
    SlotState,
    checksum,
    copy_name,
    own_name,
    parse_name,
)
from deadpool_megatron.vault.shm.table import Table
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import content, make_layout

SEAT = Seat(0, 0, 0)
LAYOUT = make_layout(3, nbytes=5000)
NAMES = tuple(part.name for part in LAYOUT.parts)
FIRST, SECOND, THIRD = Generation(1, 1), Generation(1, 2), Generation(1, 3)


# More than the stores of any life.
_MOST_LIVES = 170


class Killed(Exception):
    """The writer is dead."""


class MortalSegment:
    """Counts every store into a segment, of words and of bytes, and dies at the n-th."""

    def __init__(self, segment: Segment, lives: int) -> None:
        self.segment = segment
        self.lives = lives
        store = segment._store

        def mortal(words: memoryview, index: int, value: int) -> None:
            self.tick()
            store(words, index, value)

        segment._store = mortal  # type: ignore[method-assign]

    def tick(self) -> None:
        if self.lives == 0:
            raise Killed
        self.lives -= 1

    def bytes(self, slot: int, name: str, payload: bytes) -> None:
        half = len(payload) // 2
        self.tick()
        self.segment.data(slot, name)[:half] = payload[:half]
        self.tick()
        self.segment.data(slot, name)[half : len(payload)] = payload[half:]

    def member_writes(self, slot: int, generation: Generation) -> None:
        self.segment.mark_writing(slot)
        self.segment.begin(slot, generation, generation.lineage)
        sizes = {"shard": 5000, "tail": 1000, "extras@step": 777}
        for name, size in sizes.items():
            self.bytes(slot, name, content(3, generation, name, size))
        self.segment.fill(slot, sizes, generation.lineage)

    def member_appends(self, slot: int, generation: Generation) -> None:
        self.bytes(slot, "extras@evaluation", content(3, generation, "extras@evaluation", 555))
        self.segment.fill_part(slot, "extras@evaluation", 555, generation.lineage)

    def vault_seals(self, slot: int, epoch: int) -> None:
        for name in NAMES:
            entry = self.segment.entry(slot, name)
            if entry.state is PartState.FILLED:
                digest = checksum(self.segment.data(slot, name, entry.nbytes))
                self.segment.seal_part(slot, name, entry.nbytes, digest, epoch)
        self.segment.set_state(slot, SlotState.SEALED)

    def vault_receives(self, slot: int, generation: Generation) -> None:
        self.segment.open_slot(slot, generation, generation.lineage)
        for name, size in (("tail", 1000), ("shard", 5000)):
            payload = content(3, generation, name, size)
            self.segment.invalidate_part(slot, name, PartState.ABSENT)
            self.bytes(slot, name, payload)
            digest = checksum(memoryview(payload))
            self.segment.seal_part(slot, name, size, digest, generation.lineage)


def own_life(mortal: MortalSegment) -> None:
    """Three iterations of a member with an appended part, two slots."""
    mortal.member_writes(0, FIRST)
    mortal.vault_seals(0, 1)
    mortal.member_writes(1, SECOND)
    mortal.vault_seals(1, 1)
    mortal.member_appends(1, SECOND)
    mortal.vault_seals(1, 1)
    mortal.member_writes(0, THIRD)
    mortal.vault_seals(0, 1)


def copy_life(mortal: MortalSegment) -> None:
    """Three generations arrive at a buddy."""
    mortal.vault_receives(0, FIRST)
    mortal.vault_receives(1, SECOND)
    mortal.vault_receives(0, THIRD)


def examine(directory: Path) -> set[tuple[Generation, str]]:
    """Open what the dead writer left, check every sealed byte, answer what is sealed."""
    table = Table(directory)
    table.scan()
    found = set()
    for sealed in table.sealed():
        for name, entry in sealed.parts.items():
            view = sealed.segment.data(sealed.slot, name, entry.nbytes)
            assert bytes(view) == content(3, sealed.generation, name, entry.nbytes)
            assert checksum(view) == entry.checksum
            found.add((sealed.generation, name))
    return found


@pytest.mark.parametrize(
    ("name", "life"), [(own_name(3, SEAT), own_life), (copy_name(3), copy_life)]
)
@settings(max_examples=120)
@given(lives=st.integers(0, _MOST_LIVES))
@example(lives=_MOST_LIVES)
def test_killed_at_any_store(
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    life: Callable[[MortalSegment], None],
    lives: int,
) -> None:
    directory = tmp_path_factory.mktemp("segments")
    seat = parse_name(name)[1]
    mortal = MortalSegment(Segment.create(directory / name, LAYOUT, seat, NAMES), lives)
    whole = False
    try:
        life(mortal)
        whole = True
    except Killed:
        pass
    found = examine(directory)
    complete = {g for g, part in found if {(g, "shard"), (g, "tail")} <= found}
    assert whole or lives < _MOST_LIVES
    if whole:
        assert complete == {SECOND, THIRD}
    # Rule 3: once SECOND is complete it, or something newer, is there whatever happens.
    newest_begun = max((g for g, _ in found), default=None)
    if newest_begun == THIRD:
        assert complete & {SECOND, THIRD}


def test_files_that_are_no_segments(tmp_path: Path) -> None:
    path = tmp_path / copy_name(3)
    Segment.create(path, LAYOUT, None, NAMES)
    whole = path.read_bytes()
    for damaged in (b"", b"x" * 9000, whole[: len(whole) // 2], whole[:5000]):
        path.write_bytes(damaged)
        with pytest.raises(SegmentError):
            Segment.open(path)
    (tmp_path / copy_name(4)).write_bytes(whole)
    with pytest.raises(SegmentError, match="role 3"):
        Segment.open(tmp_path / copy_name(4))
    with pytest.raises(SegmentError):
        parse_name("own-3.seg")


def of_other_records(whole: bytes) -> bytes:
    """A whole segment whose description has a field of another name."""
    text = whole.replace(b'"layout"', b'"fields"')
    length = int.from_bytes(text[16:24], "little")
    digest = xxhash.xxh3_64_intdigest(text[4096 : 4096 + length])
    return text[:24] + digest.to_bytes(8, "little") + text[32:]


def test_a_copy_whose_description_is_damaged_goes_and_nothing_else(tmp_path: Path) -> None:
    """A vault that would not start over it costs the node, and all that is intact there."""
    for role in (3, 4):
        Segment.create(tmp_path / copy_name(role), make_layout(role), None, NAMES)
    damaged = tmp_path / copy_name(3)
    contents = bytearray(damaged.read_bytes())
    contents[4116] ^= 1
    damaged.write_bytes(contents)
    events: list[Event] = []
    network = FakeNetwork().transport("here", 1, 1.0)
    with socket.socket(socket.AF_UNIX) as local:
        vault = Vault(0, tmp_path, Settings(), network, local)
        vault._state.reports.send = events.append
        vault.start()
        assert [path.name for path in tmp_path.iterdir()] == [copy_name(4)]
        assert vault.status()["counters"]["corruption"] == 1
        vault.ended_by_signal = True
        vault.wait()
    (event,) = (event for event in events if event.kind is Kind.CORRUPTION)
    assert (event.role, event.data["where"]) == (3, copy_name(3))


def test_what_a_scan_does_not_understand_stays(tmp_path: Path) -> None:
    """Only what no version has finished goes: nothing in it can ever be restored."""
    path = tmp_path / copy_name(3)
    Segment.create(path, LAYOUT, None, NAMES)
    whole = path.read_bytes()
    (tmp_path / f".{copy_name(9)}.123").write_bytes(b"unfinished")
    (tmp_path / copy_name(5)).write_bytes(b"\0" * 9000)
    (tmp_path / copy_name(6)).write_bytes(b"")
    Table(tmp_path).scan()
    assert list(tmp_path.iterdir()) == [path]

    kept = {
        copy_name(3): of_other_records(whole),
        copy_name(4): b"DMPSEG99" + whole[8:],  # of another version
        own_name(3, SEAT): whole[:5000],
    }
    for name, text in kept.items():
        (tmp_path / name).write_bytes(text)
    table = Table(tmp_path)
    table.scan()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == kept
    with pytest.raises(SegmentError, match=r"copy-4\.seg is no segment .*kept"):
        table.require_read()
    with pytest.raises(SegmentError, match="kept"):
        found_slots(0, tmp_path)
    network = FakeNetwork().transport("here", 1, 1.0)
    with socket.socket(socket.AF_UNIX) as local:
        vault = Vault(0, tmp_path, Settings(), network, local)
        with pytest.raises(SegmentError, match="kept"):
            vault.start()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == kept


def test_copies_reserve_only_what_is_shipped(tmp_path: Path) -> None:
    layout = make_layout(3, nbytes=8 << 20)
    path = tmp_path / copy_name(3)
    segment = Segment.create(path, layout, None, ["tail"])
    assert path.stat().st_blocks * 512 < 1 << 20
    segment.reserve(["shard"], [1])
    assert 8 << 20 <= path.stat().st_blocks * 512 < 9 << 20
    segment.reserve(["shard"])
    assert path.stat().st_blocks * 512 >= 16 << 20


def test_full_shared_memory_by_the_error_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    with pytest.raises(VaultError, match="no room for"):
        Segment.create(tmp_path / copy_name(3), LAYOUT, None, NAMES)
    assert list(tmp_path.iterdir()) == []


def damage(segment: Segment, slot: int, index: int, word: int) -> None:
    """One stray store of eight bytes into the header of a slot."""
    segment._slots[slot][index] = word


def sealed_twice(directory: Path) -> Segment:
    """A copy with FIRST and SECOND, whole."""
    segment = Segment.create(directory / copy_name(3), LAYOUT, None, NAMES)
    for slot, generation in enumerate((FIRST, SECOND)):
        segment.open_slot(slot, generation, 1)
        for name in ("shard", "tail"):
            data = content(3, generation, name, segment.capacity(name))
            segment.data(slot, name)[:] = data
            segment.seal_part(slot, name, len(data), checksum(memoryview(data)), 1)
    return segment


@pytest.mark.parametrize("word", [5, 7, 1 << 63, (1 << 64) - 1])
def test_a_foreign_state_word_is_worth_nothing(tmp_path: Path, word: int) -> None:
    segment = sealed_twice(tmp_path)
    damage(segment, 0, 0, word)
    damage(segment, 1, ENTRIES, word)
    assert segment.state(0) is SlotState.EMPTY
    assert segment.entry(1, "shard").state is PartState.BAD
    table = Table(tmp_path)
    assert table.scan() == 1
    assert table.held(3)[SECOND] == {"tail"}
    table.freeze()
    table.adopt(SECOND, "step", 2, {})
    events: list[Event] = []
    with socket.socket(socket.AF_UNIX) as local:
        vault = Vault(0, tmp_path, Settings(), FakeNetwork().transport("here", 1, 1.0), local)
        vault._state.reports.send = events.append
        vault._state.table.scan()
        for _ in range(2):
            vault.status()
    told = {(e.data["part"], e.data["found"]) for e in events if e.kind is Kind.CORRUPTION}
    assert told == {("slot", f"{word:016x}"), ("shard", f"{word:016x}")}
    assert len(events) == 2


@pytest.mark.parametrize("index", [1, 2])  # lineage, iteration
def test_a_checksum_vouches_for_one_generation_only(tmp_path: Path, index: int) -> None:
    """The bytes of one generation under the name of another are no bytes at all."""
    segment = sealed_twice(tmp_path)
    for slot in (0, 1):
        for name in ("shard", "tail"):
            entry = segment.entry(slot, name)
            assert checksum(segment.data(slot, name, entry.nbytes)) == entry.checksum
    damage(segment, 0, index, 2)
    table = Table(tmp_path)
    table.scan()
    for place in table.find(3, segment.generation(0), "shard"):
        assert (checksum(place.view) == place.checksum) == (place.slot == 1)


def test_parts_cannot_be_taken_for_each_other(tmp_path: Path) -> None:
    """Equal bytes, other names or roles: what vouches for one does not for the other."""
    words = set()
    for role in (3, 4):
        layout = make_layout(role, nbytes=1000)
        segment = Segment.create(tmp_path / copy_name(role), layout, None, NAMES)
        segment.open_slot(0, FIRST, 1)
        for name in ("shard", "tail"):
            segment.seal_part(0, name, 1000, checksum(segment.data(0, name)), 1)
            words.add(segment._slots[0][segment._entry(name) + 2])
    assert len(words) == 4


def test_what_is_filled_names_its_generation(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path / own_name(3, SEAT), LAYOUT, SEAT, NAMES)
    segment.mark_writing(0)
    segment.begin(0, FIRST, 1)
    segment.fill(0, {"shard": 5000}, 1)
    assert segment.entry(0, "shard").checksum == 0
    damage(segment, 0, 2, 9)
    assert segment.entry(0, "shard").checksum != 0


@pytest.mark.parametrize("page_bytes", [4096, 64 << 10])
def test_pages_of_the_machine(tmp_path: Path, page_bytes: int) -> None:
    """Each part has whole pages of its own, for page-locks and for giving memory back, and a file
    is read with the pages it was made with."""
    path = tmp_path / own_name(3, SEAT)
    made = Segment.create(path, LAYOUT, SEAT, NAMES, page_bytes=page_bytes)
    made.data(1, "tail")[:5] = b"bytes"
    again = Segment.open(path)
    assert (again.layout, again.seat) == (LAYOUT, SEAT)
    assert again.nbytes == made.nbytes == path.stat().st_size
    assert list(tmp_path.iterdir()) == [path]
    assert bytes(again.data(1, "tail", 5)) == b"bytes"
    starts = {again.offset(slot, name) for slot in range(2) for name in NAMES}
    assert len(starts) == 2 * len(NAMES)
    assert all(start % page_bytes == 0 for start in starts)
    assert again.give_back(["shard"], 0) in (0, -(-5000 // page_bytes) * page_bytes)
    assert bytes(again.data(1, "tail", 5)) == b"bytes"


def test_every_byte_of_a_large_part_is_hashed() -> None:
    view = memoryview(bytearray((16 << 20) + 5))
    assert checksum(view) == xxhash.xxh3_64_intdigest(view)


def test_a_member_that_wakes_up_leaves_what_the_vault_has_restored(tmp_path: Path) -> None:
    segment = Segment.create(tmp_path / own_name(3, SEAT), LAYOUT, SEAT, NAMES)
    before = segment.mark_writing(0)
    segment.set_state(0, SlotState.SEALED)
    segment.back_out(0, before)
    assert segment.state(0) is SlotState.SEALED


def test_memory_is_asked_for_once_and_again_after_it_was_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a file that is to outlive the host is on its disk."""
    segment = Segment.create(tmp_path / copy_name(3), LAYOUT, None, ())
    asked, synced = list[int](), list[int]()
    monkeypatch.setattr(segment._budget, "allocate", lambda *a: asked.append(len(a[2])))
    monkeypatch.setattr(segments.os, "fsync", synced.append)
    segment.reserve(["shard"], [0])
    segment.reserve(["shard"], [0])
    segment.give_back(["shard"], 0)
    segment.reserve(["shard"], [0])
    assert asked == [1, 0, 1]
    segment.flush()
    assert synced == [segment._file]


def test_slots_are_made_where_a_process_of_this_number_was_killed(tmp_path: Path) -> None:
    """In a container numbers come again soon."""
    path = tmp_path / copy_name(3)
    path.with_name(f".{path.name}.{os.getpid()}").write_bytes(b"half a file")
    made = Segment.create(path, make_layout(3, nbytes=100), None, ["shard"])
    assert Segment.open(path).layout == made.layout
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
