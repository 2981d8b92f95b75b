"""One parity block, without processes: whatever is repeated, damaged or taken over, it is right."""

from __future__ import annotations

import itertools
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.layout import schemes
from deadpool_megatron.layout.places.parity import MEMBERS, Members, ParityPlacement
from deadpool_megatron.layout.records import (
    EpochRecord,
    Generation,
    NodeAddress,
    Restore,
    RoleLayout,
    Seat,
)
from deadpool_megatron.layout.schemes import ProtectionPlan, Scheme
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.parity.assembly import Assembly, Damaged, GivenUp, Stream
from deadpool_megatron.vault.parity.erasure import Coder
from deadpool_megatron.vault.shm.segment import PartState, checksum
from tests.vault.harness import make_layout

G = Generation(1, 0)
CHUNK = 4096


def _layout(role: int, nbytes: int) -> RoleLayout:
    """With one shard part."""
    layout = make_layout(role, nbytes)
    return replace(layout, parts=tuple(part for part in layout.parts if part.name != "tail"))


class Bench:
    """A vault's state on node k + m - 1, which is to hold a block of k roles."""

    def __init__(self, directory: Path, sizes: list[int], parities: int) -> None:
        k = len(sizes)
        self.state = VaultState(k, directory, Settings(chunk_bytes=CHUNK), lambda event: None)
        scheme = Scheme(schemes.Kind.PARITY, group=k)
        self.record = EpochRecord(
            epoch=1,
            seats={role: Seat(role, 0, 0) for role in range(k)},
            nodes={n: NodeAddress("h", 1, f"rack{n}", n >= k) for n in range(k + parities)},
            restore=Restore("initial", Generation(1, 0)),
            replicas=parities,
            protection=ProtectionPlan(scheme),
        )
        self.state.adopt(self.record)
        self.layouts: dict[int, RoleLayout] = {r: _layout(r, n) for r, n in enumerate(sizes)}
        placed = ParityPlacement.of_record(self.record)
        (self.group,) = placed.groups
        self.number = self.group.holders.index(k)
        self.role = self.group.blocks[self.number]
        self.segment = self.state.ensure_copy(placed.layout(self.role, self.layouts))

    def begin(self) -> tuple[Assembly, int]:
        slot = self.state.claim(self.segment, G, 1)
        assert slot is not None
        self.segment.reserve(["shard", MEMBERS], [slot])
        for name in ("shard", MEMBERS):
            self.state.open_part(self.segment, slot, name, 1)
        expected = {role: frozenset({"shard"}) for role in self.layouts}
        return Assembly(self.state, self.segment, slot, G, 1, self.group, expected), slot


def offer(block: bytes) -> dict[str, tuple[int, int]]:
    return {"shard": (len(block), checksum(memoryview(block)))}


def give(assembly: Assembly, stream: Stream, owner: object, block: bytes, damage: bool) -> None:
    """The next piece of a stream as its owner sends it."""
    piece = bytearray(block[stream.offset : stream.offset + CHUNK])
    digest = xxhash.xxh3_64(block[: stream.offset + len(piece)]).intdigest()
    if damage:
        piece[0] ^= 1
    assembly.combine(stream, owner, piece, digest)


@settings(max_examples=40)
@given(
    st.lists(st.integers(1, 5 * CHUNK), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(0, 1 << 30),
)
def test_any_order_of_pieces_with_faults_between(sizes: list[int], m: int, seed: int) -> None:
    """Pieces in any order, damaged ones, contributions that another connection takes over, and
    old bytes in the slot: the block is what the code says, sealed once, with what it is made of."""
    chance = random.Random(seed)
    blocks = [chance.randbytes(size) for size in sizes]
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), sizes, m)
        assembly, slot = bench.begin()
        whole = bench.segment.data(slot, "shard")
        whole[:] = chance.randbytes(len(whole))
        owners: dict[int, object] = {}
        streams: dict[int, Stream] = {}
        to_come = set(range(len(sizes)))
        while to_come:
            role = chance.choice(sorted(to_come))
            if role not in owners or chance.random() < 0.1:
                old, owners[role] = owners.get(role), object()
                (streams[role],) = assembly.open(role, offer(blocks[role]), owners[role])
                if old is not None:
                    with pytest.raises(GivenUp):
                        give(assembly, streams[role], old, blocks[role], False)
            stream, owner = streams[role], owners[role]
            if chance.random() < 0.15:
                before = bytes(whole)
                with pytest.raises(Damaged):
                    give(assembly, stream, owner, blocks[role], True)
                assert bytes(whole) == before
            else:
                give(assembly, stream, owner, blocks[role], False)
            if stream.done:
                to_come.discard(role)
                assert assembly.finish()
            assert assembly.sealed == (not to_come)
        longest = max(sizes)
        wanted = bytearray(longest)
        coder = Coder(len(sizes), m)
        for i, block in enumerate(blocks):
            coder.add(memoryview(wanted)[: len(block)], bench.number, i, bytearray(block))
        entry = bench.segment.entry(slot, "shard")
        assert (entry.state, entry.nbytes) == (PartState.SEALED, longest)
        assert bytes(whole[:longest]) == wanted
        assert entry.checksum == checksum(memoryview(wanted))
        entry = bench.segment.entry(slot, MEMBERS)
        members = Members.decode(bench.segment.data(slot, MEMBERS, entry.nbytes))
        assert members.contributions == {r: offer(block) for r, block in enumerate(blocks)}
        assert not bench.state.table.writers, "the slot is given back"


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, [5000, 5000], 1)


def test_other_bytes_than_announced_before_give_the_block_up(bench: Bench) -> None:
    assembly, _ = bench.begin()
    assembly.open(0, offer(b"a" * 5000), object())
    with pytest.raises(GivenUp):
        assembly.open(0, offer(b"b" * 5000), object())
    assert assembly.given_up
    assert not bench.state.table.writers


def test_nothing_is_combined_or_sealed_after_the_close(bench: Bench) -> None:
    assembly, _ = bench.begin()
    owner, block = object(), b"a" * 5000
    streams = {role: assembly.open(role, offer(block), owner)[0] for role in (0, 1)}
    for stream in streams.values():
        give(assembly, stream, owner, block, False)
    give(assembly, streams[0], owner, block, False)
    bench.state.close(1)
    with pytest.raises(GivenUp):
        give(assembly, streams[1], owner, block, False)
    assembly.give_up()
    assert not assembly.sealed
    assert not bench.state.inventory().holdings
    assert not bench.state.table.writers


def test_closed_between_the_last_piece_and_the_seal(bench: Bench) -> None:
    assembly, _ = bench.begin()
    owner, block = object(), b"a" * 5000
    for role, _ in itertools.product((0, 1), range(2)):
        (stream,) = assembly.open(role, offer(block), owner)
        give(assembly, stream, owner, block, False)
    bench.state.close(1)
    assert not assembly.finish()
    assert not assembly.sealed
    assert not bench.state.inventory().holdings
