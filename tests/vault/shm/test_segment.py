"""The slot file: what a reader finds after its writer was killed at any store."""

import socket
from pathlib import Path

import pytest
from hypothesis import example, given, settings, strategies as st

from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.agent_orders import Vault
from deadpool_megatron.vault.shm import segment as segments
from deadpool_megatron.vault.shm.segment import PartState, Segment, SlotState, checksum, copy_name
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
    ("name", "life"), [(segments.own_name(3, SEAT), own_life), (copy_name(3), copy_life)]
)
@settings(max_examples=120)
@given(lives=st.integers(0, _MOST_LIVES))
@example(lives=_MOST_LIVES)
def test_killed_at_any_store(tmp_path_factory, name, life, lives):
    directory = tmp_path_factory.mktemp("segments")
    seat = segments.parse_name(name)[1]
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


def test_a_copy_whose_description_is_damaged_goes_and_nothing_else(tmp_path):
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
        vault = Vault(0, tmp_path, Settings(), local, network)
        vault.store.reports.send = events.append
        vault.start()
        assert [path.name for path in tmp_path.iterdir()] == [copy_name(4)]
        assert vault.status()["counters"]["corruption"] == 1
        vault.ended_by_signal = True
        vault.wait()
    (event,) = (event for event in events if event.kind is Kind.CORRUPTION)
    assert (event.role, event.data["where"]) == (3, copy_name(3))
