"""What a holder of parity blocks answers before it takes a single byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
from deadpool_megatron.vault.errors import Refused
from deadpool_megatron.vault.net.transport import Channel
from deadpool_megatron.vault.parity import erasure
from deadpool_megatron.vault.parity.combiner import Combiner
from deadpool_megatron.vault.shm.segment import Segment, SlotState, checksum
from tests.vault.fake_network import FakeNetwork
from tests.vault.harness import make_layout
from tests.vault.parity.test_assembly import CHUNK, Bench, G, give, offer

BLOCKS = {0: b"a" * 5000, 1: b"b" * 4000}


class NoChannel(Channel):
    """Nobody may speak: the answer comes as a return value."""

    def authenticate(self) -> None: ...

    def send(self, message: object) -> None:
        raise AssertionError(message)

    def receive(self) -> dict[str, Any]:
        raise AssertionError

    def send_bulk(self, view: memoryview) -> None:
        raise AssertionError

    def receive_bulk(self, target: memoryview) -> None:
        raise AssertionError

    def readable(self, seconds: float) -> bool:
        raise AssertionError

    def give_way(self, dscp: int) -> None: ...

    def busy_seconds(self) -> float:
        raise AssertionError

    def shutdown(self) -> None: ...

    def close(self) -> None: ...


class Holder:
    """A bench whose block of generation G is sealed, and what it answers to a contribution."""

    def __init__(self, directory: Path, parities: int = 1) -> None:
        self.bench = Bench(directory, [len(block) for block in BLOCKS.values()], parities)
        transport = FakeNetwork().transport("h", 1, 1.0)
        self.combiner = Combiner(self.bench.state, transport)
        self.combiner._layouts.update(self.bench.layouts)
        self.block = self.bench.role

    def seal(self) -> None:
        assembly, _ = self.bench.begin()
        for role, block in BLOCKS.items():
            owner = object()
            (stream,) = assembly.open(role, offer(block), owner)
            while stream.offset < len(block):
                give(assembly, stream, owner, block, False)
        assert assembly.finish()

    def answer(
        self,
        role: int = 0,
        *,
        block: int | None = None,
        generation: Generation = G,
        epoch: int = 1,
        parts: dict[str, tuple[int, int]] | None = None,
    ) -> str:
        try:
            found = self.combiner.receive(
                NoChannel(),
                self.bench.layouts[role],
                self.block if block is None else block,
                generation,
                epoch,
                offer(BLOCKS[role]) if parts is None else parts,
            )
        except Refused as refused:
            return str(refused)
        return str(found["t"])


def test_what_is_refused(tmp_path: Path) -> None:
    holder = Holder(tmp_path, parities=2)
    assert holder.answer(block=77) == "no such parity block"
    other = holder.bench.group.blocks[1 - holder.bench.number]
    assert holder.answer(block=other) == "parity block of another node"
    assert holder.answer(parts={"extras@step": (3, 4)}) == "unknown part of a parity block"
    holder.bench.state.close(1)
    assert holder.answer() == "stale"
    assert not holder.bench.state.table.writers


def test_a_sealed_block_is_acknowledged_again(tmp_path: Path) -> None:
    """For the very bytes that it was made of; older generations are superseded by it."""
    holder = Holder(tmp_path)
    holder.seal()
    for role in BLOCKS:
        assert holder.answer(role) == "sealed"
    why = holder.answer(parts=offer(b"c" * 5000))
    assert why == "other bytes than a sealed parity block was made of"
    assert holder.answer(generation=Generation(0, 5)) == "superseded"


def test_who_has_forgotten_an_old_one_is_not_kept_from_the_newest(tmp_path: Path) -> None:
    """Both slots are taken by newer ones, the second of which waits for just him."""
    holder = Holder(tmp_path)
    state, segment = holder.bench.state, holder.bench.segment
    for iteration in (5, 6):
        slot = state.claim(segment, Generation(1, iteration), 1)
        assert slot is not None
        if iteration == 5:
            segment.reserve(["shard"], [slot])
            assert state.seal_copy(segment, slot, "shard", 0, 0, 1)
            state.release(segment, slot)
    assert holder.answer(generation=Generation(1, 4)) == "superseded"


def test_a_holder_that_lacks_the_package_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ModuleNotFoundError("No module named 'zfec'")

    holder = Holder(tmp_path)
    monkeypatch.setattr(erasure, "Coder", missing)
    assert holder.answer() == "no parity block possible: No module named 'zfec'"
    assert not holder.bench.state.table.writers


class Uncovered:
    """Roles 0 and 1 hold equal bytes of "tail". While they sit in two racks these are in no block;
    in epoch 2 they share a rack. Node 2 keeps the block in both."""

    def __init__(self, directory: Path) -> None:
        self.state = VaultState(2, directory, Settings(chunk_bytes=CHUNK), lambda _: None)
        self.layouts = {r: shared_tail(r) for r in (0, 1)}
        self.combiner = Combiner(self.state, FakeNetwork().transport("h", 1, 1.0))
        self.combiner._layouts.update(self.layouts)
        self.adopt(1, "rack0", Restore("initial", Generation(0, 0)))

    def adopt(self, epoch: int, first_rack: str, restore: Restore) -> None:
        scheme = Scheme(schemes.Kind.PARITY, group=2)
        racks = {0: first_rack, 1: "rack1", 2: "rack2"}
        record = EpochRecord(
            epoch=epoch,
            seats={role: Seat(role, 0, 0) for role in (0, 1)},
            nodes={n: NodeAddress("h", 1, rack, n > 1) for n, rack in racks.items()},
            restore=restore,
            protection=ProtectionPlan(scheme),
        )
        self.state.adopt(record)
        (group,) = ParityPlacement.of_record(record).groups
        self.number = group.blocks[0]
        assert group.holders == (2,)

    def contribute(self, epoch: int, **parts: bytes) -> Iterator[int]:
        """Both roles' contributions to the block of generation (1, 4); yields after each role."""
        offered = {n: (len(block), checksum(memoryview(block))) for n, block in parts.items()}
        for role, layout in self.layouts.items():
            assembly = self.combiner._assembly(layout, self.number, RESTORED, epoch, offered)
            assert assembly is not None
            owner = object()
            for stream in assembly.open(role, offered, owner):
                block = parts[stream.name]
                assembly.combine(stream, owner, bytearray(block), stream_digest(block))
            assert assembly.finish()
            yield role

    def block(self) -> tuple[set[str], set[str]]:
        """Parts of the block, and those that it says it was made of."""
        held = self.state.table.parts(self.number, RESTORED)
        places = self.state.table.find(self.number, RESTORED, MEMBERS)
        members = Members.decode(places[0].view)
        return held - {MEMBERS}, {name for one in members.contributions.values() for name in one}


RESTORED = Generation(1, 4)


def shared_tail(role: int) -> RoleLayout:
    layout = make_layout(role, nbytes=3000, peers=(0, 1))
    return replace(
        layout,
        parts=tuple(
            replace(part, replicas=(0, 1)) if part.name == "tail" else part for part in layout.parts
        ),
    )


def stream_digest(block: bytes) -> int:
    return checksum(memoryview(block))


def test_a_block_that_has_to_hold_more_is_made_beside_the_one_that_counts(tmp_path: Path) -> None:
    """Whoever is lost meanwhile comes back from the old one (rule 3)."""
    held = Uncovered(tmp_path)
    for _ in held.contribute(1, shard=b"s" * 3000):
        pass
    assert held.block() == ({"shard"}, {"shard"})
    held.state.close(1)
    held.adopt(2, "rack1", Restore("memory", RESTORED, "step"))
    parts = {"shard": b"s" * 3000, "tail": b"t" * 1000}
    for role in held.contribute(2, **parts):
        wanted = {"shard"} if role == 0 else {"shard", "tail"}
        assert held.block() == (wanted, wanted)
    assert not held.state.table.writers
    slots = [slot for slot in held.state.table.sealed(held.number) if slot.parts]
    assert [slot.generation for slot in slots] == [RESTORED]


@pytest.mark.parametrize("sealed", [0, 1, 3])
def test_a_vault_that_dies_between_two_blocks_has_one_of_them(sealed: int, tmp_path: Path) -> None:
    """Killed after so many parts of the new one; three are all."""
    held = Uncovered(tmp_path)
    for _ in held.contribute(1, shard=b"s" * 3000):
        pass
    held.state.close(1)
    held.adopt(2, "rack1", Restore("memory", RESTORED, "step"))

    class Killed(Exception):
        pass

    done = []

    def seal_part(segment: Segment, slot: int, name: str, *rest: object) -> None:
        if len(done) == sealed:
            raise Killed
        done.append(name)
        original(segment, slot, name, *rest)  # type: ignore[arg-type]

    original, empty = Segment.seal_part, Segment.set_state

    def set_state(segment: Segment, slot: int, state: SlotState) -> None:
        if state is SlotState.EMPTY and len(done) == sealed:
            raise Killed
        empty(segment, slot, state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Segment, "seal_part", seal_part)
        patch.setattr(Segment, "set_state", set_state)
        with pytest.raises(Killed):
            list(held.contribute(2, shard=b"s" * 3000, tail=b"t" * 1000))
    held.state = VaultState(2, tmp_path, Settings(), lambda _: None)
    held.state.table.scan()
    wanted = {"shard", "tail"} if sealed == 3 else {"shard"}
    assert held.block() == (wanted, wanted)
