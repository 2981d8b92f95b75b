"""Decoding between vaults of this process, from memory and from the files of a dump."""

import errno
import json
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from deadpool_megatron import failpoints
from deadpool_megatron.layout.parity_groups import INPUTS, BlockInputs
from deadpool_megatron.layout.records import Generation, Restore, Source
from deadpool_megatron.vault.disk.dump import dump
from deadpool_megatron.vault.errors import RestoreUnavailable
from deadpool_megatron.vault.restore import Restorer
from deadpool_megatron.vault.shm.segment import Segment, copy_name, dump_name
from tests.vault.harness import wait_until
from tests.vault.schemes.coded import GENERATION, CodedGroup, flip
from tests.vault.schemes.decoding import SETTINGS, Vaults, plan, seats_of

Begin = Callable[..., Vaults]


@pytest.fixture
def begin(tmp_path):
    running: list[Vaults] = []

    def start(data: int, parities: int, lost: set[int], **more: Any) -> Vaults:
        running.append(Vaults(tmp_path, CodedGroup(data, parities, **more), lost))
        return running[-1]

    yield start
    for vaults in running:
        vaults.stop()
    failpoints.load(None)


@pytest.mark.parametrize(
    ("data", "parities", "lost"),
    [(3, 1, {1}), (3, 1, {0}), (2, 1, {1}), (3, 2, {0, 2}), (1, 1, {0}), (4, 3, {0, 1, 3})],
)
def test_lost_roles_come_back_byte_for_byte(begin, data, parities, lost):
    vaults = begin(data, parities, lost)
    record = vaults.opened()
    assert set(record.restore.recipes) == lost
    for role in sorted(lost):
        vaults.obtain(record, role)
    assert len(vaults.decoded()) == len(vaults.decoded("tail")) == len(lost)
    assert not vaults.corruptions()
    wait_until(
        lambda: not [one for one in threading.enumerate() if one.name.startswith("block-")],
        "the threads of blocks end",
    )


def test_blocks_that_end_early_or_are_not_there_count_as_zeros(begin):
    """Shards that differ by more than a piece, and a role without one of the parts."""
    vaults = begin(3, 1, {1}, lacking=2)
    record = vaults.opened(replace(SETTINGS, chunk_bytes=4096))
    assert record.restore.recipes[1].decodings["tail"].blocks[2] == ()
    vaults.obtain(record, 1)
    assert vaults.decoded() == [[0, 2, 3]]
    assert vaults.decoded("tail") == [[0, 3]]


def test_too_few_intact_blocks_are_all_named(begin):
    vaults = begin(3, 2, {0})
    record = vaults.opened()
    flip(vaults.own(1), "shard")
    flip(vaults.block(0), "shard")
    with pytest.raises(RestoreUnavailable, match="role 1 on node 1: not held") as found:
        vaults.obtain(record, 0)
    blocks = {(node, role) for node, role, _ in found.value.tried}
    assert blocks == {(1, 1), (3, vaults.coded.group.blocks[0])}
    assert "parity on node 3: not held" in str(found.value)
    assert not vaults.decoded()
    held = vaults.states[vaults.spare].table.holdings()
    assert not [h for h in held if h.role == 0 and "shard" in h.parts]


def test_bytes_damaged_on_the_way_are_asked_for_once_more(begin, tmp_path):
    """With one parity there is no other block to fall to."""
    vaults = begin(3, 1, {0})
    record = vaults.opened()
    faults = tmp_path / "faults.json"
    match = {"role": 2, "part": "shard"}
    entry = {"id": "wire", "point": "vault.chunk", "match": match, "nth": 2, "action": "mark"}
    faults.write_text(json.dumps([entry]))
    failpoints.load(faults)
    vaults.obtain(record, 0)
    assert failpoints.fired(faults) == {"wire"}
    assert vaults.decoded() == [[1, 2, 3]]
    assert [e.data["where"] for e in vaults.corruptions()] == ["from node 2"]


def test_parity_of_other_bytes_gives_nothing(begin):
    """The blocks are intact, but the parity is not theirs: found, reported, never sealed."""
    vaults = begin(3, 2, {0})
    vaults.put_block(shard=vaults.coded.parity(0, "shard")[::-1])
    record = vaults.opened()
    vaults.obtain(record, 0)
    assert vaults.decoded() == [[1, 2, 4]]
    (event,) = vaults.corruptions()
    assert event.role == 0
    assert "decoded from role 1 on node 1, role 2 on node 2" in event.data["where"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda told, shard: replace(told, group=(0, 2)), "is block 2 of"),
        (lambda told, shard: contributed(told, tail=shard), "was computed without the part"),
        (lambda told, shard: contributed(told, shard=(shard[0] + 1, 0)), "which does not fit"),
        (lambda told, _: of_other_bytes(told), "other bytes than the parity was computed from"),
    ],
    ids=["group", "part", "size", "bytes"],
)
def test_members_of_another_group_or_of_other_parts_are_given_up(begin, change, why):
    """Before a byte of the part is written; the block of another node could still give it."""
    vaults = begin(2, 1, {0})
    told = vaults.coded.members(0)
    vaults.put_block(change(told, told.contributions[0]["shard"]))
    record = vaults.opened()
    with pytest.raises(RestoreUnavailable, match=why):
        vaults.obtain(record, 0)


def contributed(told: BlockInputs, **parts: tuple[int, int]) -> BlockInputs:
    """As if these were all that role 0 had contributed."""
    return replace(told, contributions={**told.contributions, 0: parts})


def of_other_bytes(told: BlockInputs) -> BlockInputs:
    """As if the block was computed from something else than what role 1 holds now."""
    nbytes, digest = told.contributions[1]["shard"]
    other = {**told.contributions[1], "shard": (nbytes, digest ^ 1)}
    return replace(told, contributions={**told.contributions, 1: other})


def test_each_place_of_a_block_lists_its_contributions(begin):
    """Two nodes hold the block of one generation. One of them made it while peers held what role 1
    has, and its bytes are damaged: what it says of itself is nothing to the other one."""
    vaults = begin(2, 1, {0})
    coded = vaults.coded
    (number,) = coded.group.blocks
    whole = vaults.block(0).read_bytes()
    parts = {name: coded.part(0, name) for name in ("shard", "tail")}
    told = coded.members(0)
    vaults.put_block(replace(told, contributions={0: told.contributions[0]}), **parts)
    vaults.directories[vaults.spare].joinpath(copy_name(number)).write_bytes(whole)
    record = vaults.opened()
    places = (Source(2, number), Source(vaults.spare, number))
    assert record.restore.recipes[0].decodings["shard"].blocks[2] == places
    flip(vaults.block(0), "shard")
    vaults.obtain(record, 0)
    assert vaults.decoded() == [[1, 2]]


def test_a_block_of_other_bytes_falls_to_the_same_block_elsewhere(begin):
    """Intact as its place vouches for it, but wrong: only with that place it gives nothing."""
    vaults = begin(2, 1, {0})
    coded = vaults.coded
    (number,) = coded.group.blocks
    vaults.directories[vaults.spare].joinpath(copy_name(number)).write_bytes(
        vaults.block(0).read_bytes()
    )
    vaults.put_block(**{name: coded.parity(0, name)[::-1] for name in ("shard", "tail")})
    vaults.obtain(vaults.opened(), 0)
    assert vaults.decoded() == [[1, 2]]
    wheres = [str(event.data["where"]) for event in vaults.corruptions()]
    assert wheres == [f"decoded from role 1 on node 1, role {number} on node 2"] * 2


@pytest.mark.slow
def test_a_node_that_cannot_be_reached_is_replaced_or_named(begin):
    vaults = begin(3, 2, {0})
    record = vaults.opened()
    vaults.network.cut.add(("fake", 2))
    vaults.obtain(record, 0)
    assert vaults.decoded() == [[1, 3, 4]]
    vaults.network.cut.add(("fake", 4))
    spare = vaults.states[vaults.spare]
    (place,) = spare.table.find(0, GENERATION, "shard")
    spare.mark_bad(place, 0)
    with pytest.raises(RestoreUnavailable, match="nobody listens"):
        vaults.obtain(record, 0)


def test_whole_copies_that_fail_fall_to_the_blocks(begin):
    vaults = begin(3, 1, {0})
    vaults.open()
    inventories = {node: state.inventory() for node, state in vaults.states.items()}
    coded = plan(inventories, seats_of(vaults.coded, {0}, vaults.spare), 3)
    hoped = {**coded.sources[0], "shard": (Source(2, 0),)}
    record = vaults.adopt(replace(coded, sources={**coded.sources, 0: hoped}))
    vaults.obtain(record, 0)
    assert vaults.decoded() == [[1, 2, 3]]


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, int, int, set[int], set[int]]:
    """k, m, the lost role, blocks whose bytes are damaged, parity whose list of members is."""
    data, parities = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    lost = draw(st.integers(0, data - 1))
    others = [number for number in range(data + parities) if number != lost]
    damaged = draw(st.sets(st.sampled_from(others), max_size=parities + 1))
    unlisted = draw(st.sets(st.sampled_from(others[data - 1 :]), max_size=1))
    return data, parities, lost, damaged, unlisted


@pytest.mark.slow
@settings(max_examples=settings().max_examples // 6)
@given(damages())
def test_decoder_seals_right_bytes_with_any_damage(case):
    """Rule 4, and that nothing is given up for which enough is left."""
    data, parities, lost, damaged, unlisted = case
    with tempfile.TemporaryDirectory() as directory:
        vaults = Vaults(Path(directory), CodedGroup(data, parities, nbytes=20_000), {lost})
        try:
            record = vaults.opened()
            for number in damaged:
                path = vaults.own(number) if number < data else vaults.block(number - data)
                flip(path, "shard")
            for number in unlisted:
                flip(vaults.block(number - data), INPUTS)
            intact = {*range(data + parities)} - {lost} - damaged
            told = {number for number in intact - unlisted if number >= data}
            # A block that does not say what it was computed from is good beside one that does.
            if len(intact) >= data and told:
                vaults.obtain(record, lost)
                return
            with pytest.raises(RestoreUnavailable):
                vaults.obtain(record, lost)
            held = vaults.states[vaults.spare].table.holdings()
            assert not [h for h in held if h.role == lost and "shard" in h.parts]
        finally:
            vaults.stop()


def test_lost_roles_come_back_from_the_files_of_a_dump(begin, tmp_path):
    """A later job on other nodes; one file is damaged, and another block stands in for it."""
    vaults = begin(3, 2, {0})
    vaults.open()
    folder = tmp_path / "dump"
    for state in vaults.states.values():
        dump(state, folder, GENERATION, "step")
    assert len(list(folder.glob("dump-*.seg"))) == 7  # 2 whole roles, 2 blocks, 3 roles' extras
    flip(folder / dump_name(1, 1), "shard")
    strange = folder / dump_name(vaults.coded.group.blocks[0], 77)
    strange.write_bytes(b"cut off")
    record = vaults.adopt(Restore("dump", Generation(2, GENERATION.iteration), path=str(folder)))
    generation = record.restore.generation
    state = vaults.states[vaults.spare]
    obtainer = Restorer(state, record, 0)
    places = obtainer.obtain(vaults.coded.layouts[0])
    for name, place in places.items():
        assert bytes(place.view) == vaults.coded.part(0, name), name
        assert place.segment.generation(place.slot) == generation
    assert vaults.decoded() == [[2, 3, 4]]
    (event, _) = vaults.corruptions()
    assert event.data["where"] == str(folder / dump_name(1, 1))
    for path in folder.glob("dump-*-4.seg"):
        if path != folder / dump_name(0, 4):
            path.unlink()
    (place,) = state.table.find(0, generation, "shard")
    state.mark_bad(place, 0)
    again = Restorer(state, record, 0)
    with pytest.raises(RestoreUnavailable, match="role 1 on node 1: checksum"):
        again.obtain(vaults.coded.layouts[0])


def test_a_file_of_a_dump_that_cannot_be_read_is_one_place_less(begin, tmp_path, monkeypatch):
    vaults = begin(3, 1, {0})
    vaults.open()
    folder = tmp_path / "dump"
    dump(vaults.states[1], folder, GENERATION, "step")
    broken = folder / dump_name(1, 1)
    shutil.copy(broken, folder / dump_name(1, 9))
    read_into = Segment.read_into

    def read(dumped: Segment, slot: int, name: str, start: int, target: memoryview) -> None:
        if dumped.path == broken:
            raise OSError(errno.EIO, "Input/output error")
        read_into(dumped, slot, name, start, target)

    monkeypatch.setattr(Segment, "read_into", read)
    record = vaults.adopt(Restore("dump", Generation(2, GENERATION.iteration), path=str(folder)))
    obtainer = Restorer(vaults.states[vaults.spare], record, 1)
    places = obtainer.obtain(vaults.coded.layouts[1])
    assert bytes(places["shard"].view) == vaults.coded.part(1, "shard")
    (folder / dump_name(1, 9)).unlink()
    vaults.states[vaults.spare].mark_bad(places["shard"], 0)
    with pytest.raises(RestoreUnavailable, match="Input/output error"):
        obtainer.obtain(vaults.coded.layouts[1])
