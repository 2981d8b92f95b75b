"""What a vault does about a slot that its member overwrites at the same moment."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.events import Event
from deadpool_megatron.layout.records import Generation, Restore, RoleLayout, Seat, Source
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import room
from deadpool_megatron.vault.epoch_gate import VaultState
from deadpool_megatron.vault.errors import Frozen, RestoreUnavailable, VaultError
from deadpool_megatron.vault.member import VaultClient
from deadpool_megatron.vault.replicate import Sender, Work
from deadpool_megatron.vault.restore import Restorer
from deadpool_megatron.vault.schemes.scheme import Target
from deadpool_megatron.vault.shm.segment import (
    Filled,
    PartState,
    Segment,
    SlotState,
    checksum,
    copy_name,
    own_name,
)
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.vault.worker import RoleWorker
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import make_layout, record_of

LAYOUT = make_layout(0, nbytes=100)
NAMES = ["shard", "tail", "extras@step"]
OLD, NEW = Generation(1, 4), Generation(1, 6)


def sealed(segment: Segment, slot: int, generation: Generation) -> None:
    segment.mark_writing(slot)
    segment.begin(slot, generation, 1)
    segment.fill(slot, dict.fromkeys(NAMES, 10), 1)
    for name in NAMES:
        segment.seal_part(slot, name, 10, checksum(segment.data(slot, name, 10)), 1)
    segment.set_state(slot, SlotState.SEALED)


@pytest.fixture
def state(tmp_path: Path) -> VaultState:
    """Of node 0 in epoch 1, with generations 4 and 5 of role 0; node 1 is the buddy."""
    state = VaultState(0, tmp_path, Settings(), lambda _: None)
    state.adopt(record_of())
    path = tmp_path / own_name(0, Seat(0, 0, 0))
    segment = Segment.create(path, LAYOUT, Seat(0, 0, 0), NAMES)
    state.table.segments[path.name] = segment
    sealed(segment, 0, OLD)
    sealed(segment, 1, Generation(1, 5))
    return state


def test_a_slot_that_is_overwritten_meanwhile_is_not_shipped_and_stops_nobody(
    state: VaultState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vault that was restarted does not know any more what is committed, and its member does."""
    table, segment = state.table, next(iter(state.table.segments.values()))
    found = table.find

    def find(role: int, generation: Generation, name: str) -> list[Place]:
        if generation == OLD:
            segment.mark_writing(0)
        return found(role, generation, name)

    monkeypatch.setattr(table, "find", find)
    work = state.shipment(LAYOUT, Target(1), 1)
    assert work is not None
    assert work[0] == Generation(1, 5)
    assert [place.name for place in work[1]] == NAMES


def test_bytes_that_have_made_way_for_a_newer_generation_are_not_damaged(state: VaultState) -> None:
    """Who read them while they changed must not spoil what has taken their place."""
    told: list[Generation] = []
    state.on_bad = lambda epoch, role, generation, part: told.append(generation)
    segment = next(iter(state.table.segments.values()))
    (place,) = state.table.find(0, OLD, "shard")
    segment.data(0, "shard")[0] ^= 0xFF
    sealed(segment, 0, NEW)
    state.mark_bad(place, 0)
    assert segment.entry(0, "shard").state is PartState.SEALED
    assert not told
    (place,) = state.table.find(0, NEW, "shard")
    state.mark_bad(place, 0)
    assert segment.entry(0, "shard").state is PartState.BAD
    assert told == [NEW]


@pytest.mark.parametrize("seat", [None, Seat(0, 0, 1)])
def test_only_damage_in_the_slot_of_a_member_is_its_members_affair(
    state: VaultState, seat: Seat | None
) -> None:
    """A copy is sent again; what a member has written in this epoch can only be recomputed."""
    told: list[Generation] = []
    state.on_bad = lambda epoch, role, generation, part: told.append(generation)
    peer = make_layout(7, nbytes=100)
    path = state.table.directory / (copy_name(7) if seat is None else own_name(7, seat))
    segment = Segment.create(path, peer, seat, NAMES)
    state.table.segments[path.name] = segment
    sealed(segment, 0, NEW)
    (place,) = state.table.find(7, NEW, "shard")
    state.mark_bad(place, 0)
    assert segment.entry(0, "shard").state is PartState.BAD
    assert told == ([] if seat is None else [NEW])


def test_bytes_that_were_restored_into_their_slot_are_not_damaged(state: VaultState) -> None:
    """Nor because of who has read what they were before, and says so after the restore."""
    segment = next(iter(state.table.segments.values()))
    (before,) = state.table.find(0, OLD, "shard")
    segment.data(0, "shard")[0] ^= 0xFF
    state.mark_bad(before, 0)
    assert segment.entry(0, "shard").state is PartState.BAD
    segment.data(0, "shard")[0] ^= 0xFF
    segment.seal_part(0, "shard", 10, before.checksum, 2)
    state.mark_bad(before, 0)
    assert segment.entry(0, "shard").state is PartState.SEALED
    assert state.reports.counters["corruption"] == 1
    (restored,) = state.table.find(0, OLD, "shard")
    state.mark_bad(restored, 0)
    assert segment.entry(0, "shard").state is PartState.BAD


def test_a_node_without_room_does_not_flood_the_log(state: VaultState) -> None:
    """Each refusal names other bytes: it is one reason, told once a second, and takes no memory."""
    events: list[Event] = []
    state.reports.send = events.append
    for count in range(1000):
        state.reports.refuse(f"no copy possible: {count} bytes needed", role=count)
    assert len(events) == 1
    assert state.reports.counters == {"refused: no copy possible: N bytes needed": 1000}
    for count in range(1000):
        state.reports.refuse("abcdefghij"[count % 10] * count)
    assert len(events) <= 1 + 201
    assert len(state.reports.counters) <= 1 + 201


def test_what_is_remembered_of_acknowledgements_is_what_slots_hold(state: VaultState) -> None:
    assert state.ledger is not None
    segment = next(iter(state.table.segments.values()))
    for k in range(6, 60):
        generation = Generation(1, k)
        sealed(segment, k % 2, generation)
        state.acknowledge(LAYOUT, generation, 1, NAMES, 1)
        assert state.committed[0] == (generation, "step")
    assert {g.iteration for _, g, _ in state.ledger._acknowledged} == {58, 59}


def test_what_a_dead_vault_has_sealed_is_held_against_its_checksum(state: VaultState) -> None:
    """It died between two parts of a slot: the next one does not vouch for what it finds there."""
    assert state.record is not None
    told: list[str] = []
    state.on_bad = lambda epoch, role, generation, part: told.append(part)
    segment = next(iter(state.table.segments.values()))
    segment.mark_writing(0)
    segment.begin(0, NEW, 1)
    segment.fill(0, dict.fromkeys(NAMES, 10), 1)
    for name in NAMES[:2]:
        segment.seal_part(0, name, 10, checksum(segment.data(0, name, 10)), 1)
    segment.data(0, NAMES[0])[5] ^= 0x10
    seat = Seat(0, 0, 0)
    worker = RoleWorker(state, state.record, 0, seat)
    worker.seal()
    assert segment.state(0) is SlotState.SEALED
    assert state.table.held(0)[NEW] == set(NAMES[1:])
    assert segment.entry(0, NAMES[0]).state is PartState.BAD
    assert told == [NAMES[0]]


RESTORED = Generation(0, 3)


def restarted(state: VaultState) -> tuple[RoleWorker, list[RoleLayout]]:
    """A worker of epoch 1, which began with RESTORED from memory, and what it has obtained."""
    assert state.record is not None
    record = replace(state.record, restore=Restore("memory", RESTORED))
    worker = RoleWorker(state, record, 0, Seat(0, 0, 0))
    obtained: list[RoleLayout] = []

    def obtain(layout: RoleLayout) -> dict[str, Place]:
        obtained.append(layout)
        return {}

    worker._restorer.obtain = obtain  # type: ignore[method-assign]
    return worker, obtained


def test_a_restarted_vault_does_not_restore_what_its_member_has_left_behind(
    state: VaultState,
) -> None:
    worker, obtained = restarted(state)
    worker._restore(LAYOUT)
    assert not obtained, "the own slots hold generations of this epoch"
    answers: list[object] = []
    worker.want(LAYOUT, answers.append)
    worker._restore(LAYOUT)
    assert obtained == [LAYOUT], "a member that asks gets what it asks for"
    assert answers == [{}]


def test_what_is_recomputed_from_a_dump_is_not_sealed_on_the_word_of_its_member(
    state: VaultState,
) -> None:
    """A vault that was restarted meanwhile has yet to read what it has to be like."""
    worker, _ = restarted(state)
    worker._record = replace(worker._record, restore=Restore("dump", RESTORED, path="here"))
    segment = next(iter(state.table.segments.values()))
    sealed(segment, 0, RESTORED)
    segment.fill_part(0, "shard", 10, 1)
    worker.seal()
    assert segment.entry(0, "shard").state is PartState.FILLED
    worker._outcome = {}  # all parts lay there whole, so they have to be like nothing
    worker.seal()
    assert segment.entry(0, "shard").state is PartState.SEALED


def test_slots_that_were_never_used_are_restored_to_at_once(state: VaultState) -> None:
    path = next(iter(state.table.segments))
    state.table.remove(state.table.segments[path])
    worker, obtained = restarted(state)
    fresh = Segment.create(state.table.directory / path, LAYOUT, Seat(0, 0, 0), NAMES)
    state.table.segments[path] = fresh
    worker._restore(LAYOUT)
    assert obtained == [LAYOUT]


@pytest.mark.parametrize("left", [SlotState.WRITING, SlotState.FILLED, SlotState.EMPTY])
def test_a_slot_that_the_member_may_have_chosen_is_not_begun_before_it_asks(
    state: VaultState, left: SlotState
) -> None:
    """It may have looked, been stopped, and go on with the epoch before at any time."""
    worker, obtained = restarted(state)
    segment = next(iter(state.table.segments.values()))
    for slot in range(segment.slots):
        segment.mark_writing(slot)
        segment.begin(slot, Generation(0, 4 + slot), 1)
        segment.set_state(slot, left)
    worker.epoch = 2
    worker._restore(LAYOUT)
    assert not obtained
    worker.want(LAYOUT, lambda _: None)
    worker._restore(LAYOUT)
    assert obtained == [LAYOUT]


def test_the_slot_that_holds_the_generation_is_looked_at_before_the_member_asks(
    state: VaultState,
) -> None:
    """Whatever it does to the others: that one it does not take."""
    worker, obtained = restarted(state)
    segment = next(iter(state.table.segments.values()))
    sealed(segment, 0, RESTORED)
    segment.mark_writing(1)
    worker.epoch = 2
    worker._restore(LAYOUT)
    assert obtained == [LAYOUT]


def test_the_member_writes_after_a_restore_of_an_epoch_that_is_over(
    state: VaultState, tmp_path: Path
) -> None:
    """Its thread may stand in the middle of a part while the next epoch is under way."""
    assert state.record is not None
    segment = next(iter(state.table.segments.values()))
    record = replace(state.record, restore=Restore("memory", RESTORED))
    state.close(1)
    state.adopt(replace(record, epoch=2))
    slot = state.claim(segment, RESTORED, 2)
    assert slot is not None
    state.open_part(segment, slot, "shard", 2)
    state.close(2)
    state.adopt(replace(record, epoch=3))
    assert state.claim(segment, RESTORED, 3) is None, "one thread at a time"
    client = VaultClient("", tmp_path, Seat(0, 0, 0), connect_seconds=1.0)
    client._enter(3)
    client._segment, client._restored = Segment.open(segment.path), RESTORED
    with pytest.raises(Frozen):
        client.begin(Generation(3, 4), 3)
    assert [segment.state(one) for one in range(segment.slots)].count(SlotState.WRITING) == 0
    state.release(segment, slot)
    writer = client.begin(Generation(3, 4), 3)
    assert segment.state(slot) is SlotState.SEALED, "of the generation, and it has another one"
    writer.abandon()
    assert state.claim(segment, RESTORED, 3) == slot


def test_what_is_copied_on_the_node_is_given_up_with_its_epoch(
    state: VaultState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The member of the next epoch waits until the slot is let go of."""
    assert state.record is not None
    last = next(iter(state.table.segments.values()))
    last.data(0, "shard", 10)[:] = b"0123456789"
    sealed(last, 0, OLD)
    seat = Seat(0, 0, 1)
    record = replace(state.record, epoch=2, restore=Restore("memory", OLD), seats={0: seat})
    state.close(1)
    state.adopt(record)
    obtainer = Restorer(state, record, 0)
    monkeypatch.setattr(state, "open_part", lambda *_: state.close(2))
    with pytest.raises(VaultError, match="was closed"):
        obtainer.obtain(LAYOUT)
    assert not state.table.writers
    own = state.table.own(0, seat)
    assert own is not None
    assert not any(any(own.data(slot, "shard", 10)) for slot in range(own.slots))


def test_a_source_that_lacks_a_part_costs_no_memory(state: VaultState, tmp_path: Path) -> None:
    network = FakeNetwork()
    theirs, state.transport = (network.transport("fake", number, 10.0) for number in (1, 2))
    assert state.record is not None
    sources = {0: {"extras@step": (Source(1, 0),)}}
    restore = Restore("memory", RESTORED, sources=sources)
    record = replace(state.record, restore=restore, seats={0: Seat(0, 0, 1)})  # it has no slots
    obtainer = Restorer(state, record, 0)
    before = set(tmp_path.glob("*.seg"))

    def refuse() -> None:
        channel = theirs.await_one()
        assert channel.receive()["t"] == "describe"
        channel.send({"t": "layout", "layout": None, "parts": [], "elsewhere": []})
        assert channel.receive()["t"] == "fetch"
        channel.send({"t": "refused", "why": "not held"})

    source = threading.Thread(target=refuse)
    source.start()
    with pytest.raises(RestoreUnavailable, match="not held"):
        obtainer.obtain(LAYOUT)
    source.join(10.0)
    assert set(tmp_path.glob("*.seg")) == before


def test_a_source_that_is_gone_from_the_record_says_nothing_of_a_role(state: VaultState) -> None:
    """It ends nothing: the member tells its layout itself, later."""
    assert state.record is not None
    gone = 7
    assert gone not in state.record.nodes
    restore = Restore("memory", RESTORED, sources={0: {"shard": (Source(gone, 0),)}})
    record = replace(state.record, restore=restore)
    state.transport = FakeNetwork().transport("here", 2, 10.0)
    obtainer = Restorer(state, record, 0)
    assert obtainer.describe() is None


def test_memory_is_given_back_without_the_lock(
    state: VaultState, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_layout(7, nbytes=1 << 20)
    copy = room.ensure_copy(state, layout, NEW)
    copy.reserve(NAMES)
    copy.open_slot(0, Generation(1, 0), 1)
    given: list[int] = []

    def checked(_: Segment, __: list[str], slot: int) -> int:
        other = threading.Thread(target=take_and_release, daemon=True)
        other.start()
        other.join(5.0)
        assert not other.is_alive(), "the lock is held"
        assert state.claim(copy, NEW, 1) is None, "the slots are nobody's meanwhile"
        given.append(slot)
        return 1

    def take_and_release() -> None:
        with state.lock:
            pass

    monkeypatch.setattr(Segment, "give_back", checked)
    assert state.ledger is not None
    monkeypatch.setattr(state.ledger.scheme, "keeps", lambda *_: ())
    assert room.give_back(state, NEW)
    assert given == [0, 1]
    assert not state.table.writers


def test_only_what_is_in_a_slot_of_the_one_who_plays_the_role_is_sealed(state: VaultState) -> None:
    """A slot may be begun anew while it is hashed, and a member may lose its seat."""
    segment = next(iter(state.table.segments.values()))
    before = segment.entry(0, "shard")
    assert not state.seal_own(segment, Filled(0, NEW, {}, [], False), {"shard": 1}, 1), (
        "the slot holds another one"
    )
    assert state.record is not None
    restore = Restore("memory", OLD)
    moved = replace(state.record, epoch=2, seats={0: Seat(0, 0, 1)}, restore=restore)
    state.close(1)
    assert state.adopt(moved)
    assert not state.seal_own(segment, Filled(0, OLD, {}, [], False), {"shard": 1}, 2), (
        "its member has no seat"
    )
    assert segment.entry(0, "shard") == before


def test_what_is_committed_is_never_told_backwards(state: VaultState) -> None:
    told: list[Generation] = []
    state.on_committed = lambda role, generation, boundary: told.append(generation)
    newest = Generation(1, 5)
    for generation in (newest, OLD):
        state.acknowledge(LAYOUT, generation, 1, NAMES, 1)
    assert told == [newest]
    assert state.committed[0] == (newest, "step")


def test_what_an_owner_vouches_for_stays_off_sealed_bytes(state: VaultState) -> None:
    copy = room.ensure_copy(state, make_layout(7, nbytes=100), NEW)
    copy.open_slot(0, OLD, 1)
    copy.seal_part(0, "shard", 100, 11, 1)
    state.note_elsewhere(copy, 0, [("shard", 100, 12), ("tail", 10, 13)], 1)
    states = [copy.entry(0, name).state for name in ("shard", "tail")]
    assert states == [PartState.SEALED, PartState.ELSEWHERE]


class RefusedSender(Sender):
    """Brings nothing there, so many times; then all of it."""

    times = 0

    def _next(self) -> Work:
        return Generation(1, 1), []

    def _bring(self, _: Work) -> bool:
        self.times -= 1
        if self.times < 0:
            self._state.close(1)
        return self.times < 0


@pytest.mark.parametrize("times", [1, 200])
def test_what_a_node_refuses_is_offered_again_within_a_second(
    state: VaultState, times: int
) -> None:
    """However often it was refused: what it lacks is not protected until then."""
    waits = list[float]()
    state.pause = lambda epoch, seconds: waits.append(seconds)  # type: ignore[method-assign]
    assert state.ledger is not None
    sender = RefusedSender(state, LAYOUT, Target(1), state.ledger.scheme)
    sender.times = times
    sender.run()
    assert len(waits) == times
    assert waits[0] < 0.1
    assert max(waits) < 1.0
    assert waits == sorted(waits), "the longer it goes on, the less often"
