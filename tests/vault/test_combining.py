"""What a holder of parity blocks answers before it takes a single byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault import erasure
from deadpool_megatron.vault.combining import Combiner
from deadpool_megatron.vault.transport import Channel, FakeNetwork
from tests.vault.test_assembling import Bench, G, give, offer

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
        found = self.combiner.receive(
            NoChannel(),
            self.bench.layouts[role],
            self.block if block is None else block,
            generation,
            epoch,
            offer(BLOCKS[role]) if parts is None else parts,
        )
        return str(found.get("why", found["t"]))


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
