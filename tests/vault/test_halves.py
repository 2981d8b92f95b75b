"""Two vaults, one process, real sockets: the owner's part arrives whatever becomes of the base."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deadpool_megatron.events import Kind
from deadpool_megatron.layout.bases import MASTERS_PART
from deadpool_megatron.layout.records import Generation, extras_part
from deadpool_megatron.vault import halves
from deadpool_megatron.vault.dumping import dump
from deadpool_megatron.vault.segment import PartState, Segment, checksum
from deadpool_megatron.vault.transport import Channel
from deadpool_megatron.wire.framing import ConnectionClosed
from tests.vault.halving import EPOCH, Pair, Shape
from tests.vault.harness import wait_until

VALUES = 3000
SHAPE = Shape.of(VALUES)
MASTERS, NBYTES = SHAPE.masters, SHAPE.nbytes
shard, weights = SHAPE.shard, SHAPE.weights


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    running = Pair(tmp_path, SHAPE)
    yield running
    running.stop()


def test_with_the_weights_there_two_bytes_of_four_travel(pair: Pair) -> None:
    for iteration in range(4):
        pair.keep(iteration)
        pair.own(iteration)
        pair.check(iteration)
    exceptions = 2 * len(MASTERS.runs) * 8
    assert pair.shipped == 4 * (NBYTES - 2 * VALUES + exceptions + len(b"extras"))
    assert pair.as_halves == 4
    assert not pair.given_up()
    assert not [e for e in pair.owner.events if e.kind is Kind.CORRUPTION]


def test_the_buddy_waits_for_weights_that_are_on_their_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "_PATIENCE_SECONDS", 60.0)
    pair.own(0)
    wait_until(lambda: pair.buddy.state.counters["bytes received"], "the halves are there")
    assert 0 not in pair.owner.state.committed
    pair.keep(0)
    pair.check(0)
    assert pair.as_halves == 1


def test_a_generation_whose_weights_are_missing_travels_whole(pair: Pair) -> None:
    pair.buddy.seal(0, {extras_part("step"): b"no weights"})
    pair.own(0)
    pair.check(0)
    assert pair.given_up() == {"halves: no base of this generation": 1}
    pair.keep(1)
    pair.own(1)
    pair.check(1)
    assert pair.as_halves == 1


def test_weights_that_do_not_come_are_not_waited_for_long(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "_PATIENCE_SECONDS", 0.01)
    pair.own(0)
    pair.check(0)
    assert pair.given_up() == {"halves: no base of this generation": 1}


def test_where_nobody_keeps_weights_everything_travels_whole_at_once(tmp_path: Path) -> None:
    pair = Pair(tmp_path, SHAPE)
    try:
        pair.buddy.state.table.segments.clear()
        pair.own(0)
        pair.check(0)
        assert pair.shipped == NBYTES + len(b"extras")
        assert not pair.given_up()
    finally:
        pair.stop()


def test_the_weights_of_another_generation_are_not_taken(pair: Pair) -> None:
    """Their member has gone on without us; what it holds now would give other masters."""
    pair.keep(1)
    pair.own(0)
    pair.check(0)
    assert pair.given_up() == {"halves: no base of this generation": 1}


def test_damaged_weights_are_found_and_after_three_times_not_used(pair: Pair) -> None:
    for iteration in range(5):
        base = weights(shard(iteration))
        base[100] ^= 1
        pair.keep(iteration, base)
        pair.own(iteration)
        pair.check(iteration)
    assert pair.given_up() == {"halves: other bytes": 3}
    assert pair.as_halves == 0
    (warning,) = [e.data["text"] for e in pair.owner.events if e.kind is Kind.LOG]
    assert warning == (
        "--deadpool-compaction: role 0 ships whole to node 1 for the rest of epoch 1: other bytes,"
        " 3 times in a row"
    )


def test_damage_in_the_owners_slot_is_found_there(pair: Pair) -> None:
    """Halves cannot tell whose bytes are wrong; the whole part can."""
    pair.keep(0)
    pair.own(0, damaged="shard")
    wait_until(lambda: pair.owner.state.counters["corruption"], "the owner has found it")
    assert pair.given_up() == {"halves: other bytes": 1}
    assert not pair.owner.state.table.find(0, Generation(EPOCH, 0), "shard")
    assert not pair.buddy.state.table.find(0, Generation(EPOCH, 0), "shard")


def test_masters_that_are_not_understood_are_left_alone(pair: Pair) -> None:
    pair.keep(0)
    content = {"shard": shard(0), extras_part("step"): b"extras", MASTERS_PART: b"[1, 2]"}
    pair.owner.seal(0, content)
    pair.check(0)
    assert pair.as_halves == 0


def test_a_shorter_base_is_not_read_beyond_its_end(pair: Pair) -> None:
    pair.keep(0, weights(shard(0))[:-2000])
    pair.own(0)
    pair.check(0)
    assert pair.given_up() == {"halves: a shorter base": 1}


def test_a_part_of_nans_travels_whole(pair: Pair) -> None:
    part = shard(0)
    part[64:4064] = np.full(1000, 0x7FC0_0001, np.uint32).tobytes()
    pair.keep(0, weights(part))
    pair.own(0, part)
    pair.check(0, part)
    assert pair.given_up() == {"halves: too many exceptions": 1}


def test_a_close_ends_the_wait_for_weights_and_nothing_is_sealed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "_PATIENCE_SECONDS", 60.0)
    pair.own(0)
    wait_until(lambda: pair.buddy.state.counters["bytes received"], "the halves are there")
    pair.buddy.state.close(EPOCH)
    wait_until(lambda: not pair.buddy.state.table.writers, "the slot is let go")
    assert not pair.given_up(), "a close is no failure of halves"
    assert not [h for h in pair.buddy.state.inventory().holdings if "shard" in h.parts]


def test_what_breaks_while_it_is_put_together_travels_whole(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A buddy that never answers, or ends over it, must not be asked for the same again."""

    def broken(*_: Any) -> str:
        raise ConnectionClosed("no answer")

    pair.keep(0)
    with monkeypatch.context() as patch:
        patch.setattr(halves.HalvesTaker, "finish", broken)
        pair.own(0)
        pair.check(0)
    assert pair.as_halves == 0
    pair.keep(1)
    pair.own(1)
    pair.check(1)
    assert pair.as_halves == 1


def test_halves_that_break_three_times_are_not_tried_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a mistake that ends the buddy's vault would end it in every iteration."""
    tried = []

    def broken(*_: Any) -> str:
        tried.append(1)
        raise ConnectionClosed("no answer")

    monkeypatch.setattr(halves.HalvesTaker, "finish", broken)
    for iteration in range(5):
        pair.keep(iteration)
        pair.own(iteration)
        pair.check(iteration)
    assert len(tried) == 3
    (warning,) = [e.data["text"] for e in pair.owner.events if e.kind is Kind.LOG]
    assert warning.endswith("for the rest of epoch 1: no answer, 3 times in a row")


def test_local_parts_are_owed_to_nobody(pair: Pair) -> None:
    pair.keep(0)
    pair.own(0)
    pair.wait(0)
    found = pair.buddy.state.table.parts(0, Generation(EPOCH, 0))
    assert found == {"shard", extras_part("step")}
    segment = pair.buddy.state.table.copy(0)
    assert segment is not None
    assert {name for _, name in segment._reserved} == found


def test_a_dump_holds_what_can_be_restored_only(pair: Pair, tmp_path: Path) -> None:
    pair.keep(0)
    pair.own(0)
    pair.wait(0)
    generation = Generation(EPOCH, 0)
    (path,) = dump(pair.owner.state, tmp_path / "dump", generation, None, [0])
    dumped = Segment.open(Path(path), writable=False)
    sealed = {
        part.name
        for part in dumped.layout.parts
        if dumped.entry(0, part.name).state is PartState.SEALED
    }
    assert sealed == {"shard", extras_part("step")}


def test_what_was_restored_travels_whole(pair: Pair) -> None:
    """Its base is of another epoch, if there is one."""
    sender = halves.HalvesSender(pair.owner.state, pair.owner.layout, 1, EPOCH + 1)
    pair.keep(0)
    pair.own(0)
    pair.wait(0)
    (place,) = pair.owner.state.table.find(0, Generation(EPOCH, 0), "shard")
    assert sender.offer(None, Generation(EPOCH, 0), [place]) == {}  # type: ignore[arg-type]


# What only a broken or foreign vault sends.


@pytest.fixture
def stranger(pair: Pair) -> Iterator[Channel]:
    channel = pair.owner.transport.connect("fake", 1)
    channel.send({"t": "offer", "layout": pair.owner.layout.to_dict()})
    yield channel
    channel.close()


def put(**more: Any) -> dict[str, Any]:
    part = shard(0)
    return {
        "t": "put",
        "epoch": EPOCH,
        "node": 0,
        "role": 0,
        "generation": [EPOCH, 0],
        "follows": None,
        "layout_hash": "hash",
        "parts": [["shard", NBYTES, checksum(memoryview(part))]],
        "chain": [],
        "halves": ["shard"],
        **more,
    }


def refused(pair: Pair, what: str) -> Callable[[], bool]:
    return lambda: any(what in name for name in pair.buddy.state.counters)


@pytest.mark.parametrize(
    "parts",
    [
        {"shard": [[NBYTES - 4, 2, 0]]},
        {"shard": [[1, 2]]},
        {"extras@step": [[0, 2, 0]]},
        {"nothing": []},
        [1],
    ],
)
def test_impossible_masters_are_refused_and_counted(
    pair: Pair, stranger: Channel, parts: Any
) -> None:
    stranger.send({"t": "masters", "parts": parts})
    wait_until(refused(pair, "refused: malformed"), "it is counted")


def test_halves_of_an_unknown_part_are_refused(pair: Pair, stranger: Channel) -> None:
    stranger.send({"t": "masters", "parts": {"shard": MASTERS.to_list()}})
    stranger.send(put(halves=["tail"]))
    wait_until(refused(pair, "refused: malformed"), "it is counted")


@pytest.mark.parametrize("count", [VALUES, -1, "many"])
def test_an_impossible_number_of_exceptions_is_refused(
    pair: Pair, stranger: Channel, count: Any
) -> None:
    stranger.send({"t": "masters", "parts": {"shard": MASTERS.to_list()}})
    stranger.send(put())
    assert stranger.receive()["halves"] == ["shard"]
    stranger.send_bulk(memoryview(bytes(NBYTES - MASTERS.saved_bytes)))
    stranger.send({"t": "exceptions", "count": count})
    wait_until(refused(pair, "refused"), "it is counted")
    assert not pair.buddy.state.table.writers


def test_an_exception_behind_the_last_master_is_refused(pair: Pair, stranger: Channel) -> None:
    pair.keep(0)
    stranger.send({"t": "masters", "parts": {"shard": MASTERS.to_list()}})
    stranger.send(put())
    assert stranger.receive()["halves"] == ["shard"]
    stranger.send_bulk(memoryview(bytes(NBYTES - MASTERS.saved_bytes)))
    stranger.send({"t": "exceptions", "count": 1})
    stranger.send_bulk(memoryview(np.array([VALUES, 0], np.uint32)).cast("B"))
    wait_until(refused(pair, "refused: malformed"), "it is counted")


def test_nothing_is_left_running(tmp_path: Path) -> None:
    before = set(threading.enumerate())  # those of other tests may still be ending
    pair = Pair(tmp_path, SHAPE)
    pair.own(0)
    pair.stop()
    ours = ("ship-0", "serve-")
    wait_until(
        lambda: not [t for t in {*threading.enumerate()} - before if t.name.startswith(ours)],
        "their threads have ended",
    )
