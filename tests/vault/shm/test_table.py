"""Which slot of a copy may be overwritten, what freezing promises, what adopting drops."""

from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.vault.shm import segment as segments, table as tables
from deadpool_megatron.vault.shm.table import Place, Table
from tests.vault.harness import make_layout

SEAT = Seat(0, 0, 0)
LAYOUT = make_layout(3, nbytes=100)
SHARD = ["shard", "tail", "extras@step"]


def table_with_copy(directory: Path, slots: int = 2) -> tuple[Table, segments.Segment]:
    table = Table(directory)
    layout = make_layout(3, nbytes=100, slots=slots)
    segment = segments.Segment.create(directory / segments.copy_name(3), layout, None, SHARD)
    table.segments[segment.path.name] = segment
    return table, segment


def keep(segment: segments.Segment, slot: int, names: list[str], epoch: int) -> None:
    for name in names:
        segment.seal_part(slot, name, 10, segments.checksum(segment.data(slot, name, 10)), epoch)


def own(table: Table, *generations: Generation) -> segments.Segment:
    """A member's segment with one sealed generation in each slot."""
    segment = segments.Segment.create(
        table.directory / segments.own_name(3, SEAT), LAYOUT, SEAT, SHARD
    )
    table.segments[segment.path.name] = segment
    for slot, generation in enumerate(generations):
        segment.mark_writing(slot)
        segment.begin(slot, generation, generation.lineage)
        segment.fill(slot, dict.fromkeys(SHARD, 10), generation.lineage)
        keep(segment, slot, SHARD, generation.lineage)
        segment.set_state(slot, segments.SlotState.SEALED)
    return segment


@settings(max_examples=60)
@given(
    slots=st.integers(2, 4),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=14),
)
def test_a_copy_never_loses_its_newest_complete_generation(
    tmp_path_factory: pytest.TempPathFactory, slots: int, events: list[tuple[bool, int]]
) -> None:
    """Puts in a Replicator's order, some cut off and repeated, old ones offered again: rule 3."""
    table, segment = table_with_copy(tmp_path_factory.mktemp("copy"), slots)
    number = 0
    complete: set[Generation] = set()
    for whole, back in events:
        # A generation is offered until it is there; after a restart of its owner an older one too.
        repeated = bool(back) and number >= back
        generation = Generation(1, number - back if repeated else number)
        slot = table.claim(segment, generation, 1)
        if slot is None:
            assert repeated
            continue
        assert table.claim(segment, generation, 1) is None  # one writer at a time
        keep(segment, slot, SHARD if whole else SHARD[:1], 1)
        table.release(segment, slot)
        if whole and not repeated:
            complete.add(generation)
            number += 1
        held = {h.generation for h in table.holdings() if h.parts >= set(SHARD)}
        if complete:
            assert max(complete) in held


def test_pinned_and_written_slots_are_left_alone(tmp_path: Path) -> None:
    table, segment = table_with_copy(tmp_path)
    for iteration in (1, 2):
        slot = table.claim(segment, Generation(1, iteration), 1)
        assert slot is not None
        keep(segment, slot, SHARD, 1)
        table.release(segment, slot)
    assert table.claim(segment, Generation(1, 0), 1) is None, "older than what is held"
    place = table.find(3, Generation(1, 1), "shard")[0]
    table.pin(place)
    assert table.claim(segment, Generation(1, 3), 1) is None
    table.unpin(place)
    slot = table.claim(segment, Generation(1, 3), 1)
    assert slot == place.slot
    assert table.claim(segment, Generation(1, 4), 1) is None
    assert not table.superseded(segment, Generation(1, 2))


def test_frozen_answers_what_was_promised(tmp_path: Path) -> None:
    """A member that was stopped before its store and wakes up after the freeze changes nothing."""
    table = Table(tmp_path)
    segment = own(table, Generation(1, 1), Generation(1, 2))
    before = table.holdings()
    table.freeze()
    assert segment.is_frozen()
    state = segment.mark_writing(0)  # the late store; then it is killed before backing out
    assert state is segments.SlotState.SEALED
    assert table.holdings() == before
    assert len(table.find(3, Generation(1, 1), "shard")) == 1
    table.adopt(Generation(1, 1), "step", 2, {3: SEAT})
    assert segment.state(0) is segments.SlotState.SEALED
    assert segment.state(1) is segments.SlotState.EMPTY
    assert not segment.is_frozen()
    assert [h.generation for h in table.holdings()] == [Generation(1, 1)]


def test_a_member_without_a_seat_stays_frozen(tmp_path: Path) -> None:
    table = Table(tmp_path)
    segment = own(table, Generation(1, 1))
    table.freeze()
    table.adopt(Generation(1, 1), "step", 2, {3: Seat(0, 0, 1)})
    assert segment.is_frozen()


def test_a_member_does_not_write_beside_a_restore_of_the_epoch_before(tmp_path: Path) -> None:
    """A thread that still receives may not put bytes into what the member writes by now."""
    table = Table(tmp_path)
    segment = own(table)
    table.adopt(Generation(1, 4), "step", 2, {3: SEAT})
    slot = table.claim(segment, Generation(1, 4), 2)
    assert slot is not None
    assert not segment.is_frozen()
    table.freeze()
    table.adopt(Generation(1, 3), "step", 3, {3: SEAT})
    assert segment.state(slot) is segments.SlotState.EMPTY
    assert segment.is_frozen()
    other = table.claim(segment, Generation(1, 3), 3)
    assert other is not None
    assert other != slot
    table.release(segment, slot)
    assert segment.is_frozen(), "the vault restores into another slot of it now"
    table.freeze()
    table.release(segment, other)
    assert segment.is_frozen(), "promised"
    table.adopt(Generation(1, 3), "step", 4, {3: SEAT})
    assert not segment.is_frozen()


def test_adopting_drops_the_abandoned_and_nothing_else(tmp_path: Path) -> None:
    table, segment = table_with_copy(tmp_path, slots=4)
    member = own(table, Generation(2, 6), Generation(2, 7))
    generations = [Generation(1, 9), Generation(2, 6), Generation(2, 7), Generation(3, 7)]
    for slot, generation in enumerate(generations):
        segment.open_slot(slot, generation, generation.lineage)
        keep(segment, slot, [*SHARD, "extras@evaluation"], generation.lineage)
    # The own slot 0 has extras of the abandoned rest of epoch 2, and some appended in epoch 3.
    keep(member, 0, ["extras@evaluation"], 2)
    keep(member, 0, ["extras@save"], 3)
    table.adopt(Generation(2, 6), "step", 3, {3: SEAT})
    assert {s.generation for s in table.sealed(3) if s.segment is segment} == {
        Generation(1, 9),
        Generation(2, 6),
        Generation(3, 7),
    }
    assert member.state(1) is segments.SlotState.EMPTY
    assert member.entry(0, "extras@evaluation").state is segments.PartState.ABSENT
    assert member.entry(0, "extras@save").state is segments.PartState.SEALED
    # Older generations keep their extras: only those after the resume point are abandoned.
    assert segment.entry(0, "extras@evaluation").state is segments.PartState.SEALED


def test_unsealed_things_of_an_older_epoch_are_dropped(tmp_path: Path) -> None:
    table = Table(tmp_path)
    segment = own(table, Generation(1, 1))
    segment.mark_writing(1)
    segment.begin(1, Generation(1, 2), 1)
    segment.fill(1, dict.fromkeys(SHARD, 10), 1)
    segment.fill_part(0, "extras@evaluation", 10, 1)
    table.adopt(Generation(1, 1), "evaluation", 2, {3: SEAT})
    assert segment.state(1) is segments.SlotState.EMPTY
    assert segment.entry(0, "extras@evaluation").state is segments.PartState.ABSENT


def test_damaged_parts_are_not_promised(tmp_path: Path) -> None:
    table = Table(tmp_path)
    segment = own(table, Generation(1, 1))
    table.freeze()
    entry = segment.entry(0, "shard")
    table.mark_bad(Place(segment, 0, "shard", entry.nbytes, entry.checksum, entry.epoch))
    assert table.holdings()[0].parts == {"tail", "extras@step"}
    assert segment.entry(0, "shard").state is segments.PartState.BAD


def test_what_is_unneeded(tmp_path: Path) -> None:
    table, segment = table_with_copy(tmp_path)
    assert not table.unneeded(segment, lambda _: 50, 2)  # just made
    slot = table.claim(segment, Generation(1, 3), 1)
    assert slot is not None
    keep(segment, slot, SHARD, 1)
    assert not table.unneeded(segment, lambda _: 9, 2)  # being written
    table.release(segment, slot)
    assert not table.unneeded(segment, lambda _: 1, 2)
    assert table.unneeded(segment, lambda held: 2 if held == Generation(1, 3) else 0, 2)
    table.pin(table.find(3, Generation(1, 3), "shard")[0])
    assert not table.unneeded(segment, lambda _: 2, 2)


def test_what_is_promised_is_read_after_the_fence_and_goes_with_its_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that was about to take a slot is seen, or sees that it may not. One that comes
    during the close may not either, nor any before what was abandoned is dropped."""
    table = Table(tmp_path)
    segment = own(table, Generation(1, 1), Generation(1, 2))
    seen: list[tuple[bool, segments.SlotState]] = []
    take = lambda: seen.append((segment.is_frozen(), segment.mark_writing(0)))  # noqa: E731
    monkeypatch.setattr(tables, "fence", take)
    table.freeze()
    assert seen == [(True, segments.SlotState.SEALED)]
    assert {holding.generation for holding in table.holdings()} == {Generation(1, 2)}
    late = tmp_path / segments.own_name(3, Seat(0, 0, 1))
    segments.Segment.create(late, LAYOUT, Seat(0, 0, 1), SHARD)
    assert table.attach(late.name).is_frozen()
    states: list[segments.SlotState] = []
    monkeypatch.setattr(table, "let_write", lambda _: states.append(segment.state(1)))
    table.adopt(Generation(1, 1), "step", 2, {3: SEAT})
    assert set(states) == {segments.SlotState.EMPTY}
    keep(segment, 1, SHARD, 2)
    segment.set_state(1, segments.SlotState.SEALED)
    table.freeze()
    table.remove(segment)
    assert table.holdings() == ()


@pytest.mark.parametrize(
    ("held", "is_superseded"), [((7, 8), True), ((5, 8), False), ((8,), False)]
)
def test_an_offer_is_superseded_when_every_slot_holds_something_newer(
    tmp_path: Path, held: tuple[int, ...], is_superseded: bool
) -> None:
    """One newer slot is not enough: the offered one may still be asked for, and has a place."""
    table, segment = table_with_copy(tmp_path)
    for slot, iteration in enumerate(held):
        segment.open_slot(slot, Generation(1, iteration), 1)
        keep(segment, slot, SHARD, 1)
    assert table.superseded(segment, Generation(1, 6)) is is_superseded
