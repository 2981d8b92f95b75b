"""Roles of another size: each part is cut from intact parts of old roles, or not sealed at all."""

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.layout.grid import Grid
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.planner import RestoreQuery, choose_restore
from deadpool_megatron.layout.records import BadPart, PartInfo, Restore, RoleLayout, Seat
from deadpool_megatron.layout.shard_map import Run, ShardMap
from deadpool_megatron.layout.sizes import Sizes
from deadpool_megatron.vault import errors, slot_memory
from deadpool_megatron.vault.restore import Restorer
from tests.vault.harness import record_of
from tests.vault.schemes.coded import EXTRAS, GENERATION, CodedGroup, flip, seal
from tests.vault.schemes.decoding import Vaults

NEW, PADDING = 1_000_000, 63
SEATS = {NEW: Seat(0, 0, 0), NEW + 1: Seat(4, 0, 0)}


def mapped(start: int, nbytes: int, offset: int = 0, key: str = "weight") -> ShardMap:
    return ShardMap.of({"shard": (Run(key, start, nbytes, {"": (offset, 1, 1)}),)})


class Resized:
    """Three roles with a part of a parameter each become two; parity is on node 3."""

    def __init__(self, directory: Path, lost: set[int]) -> None:
        self.whole, coded = b"", CodedGroup(3, 1)
        for role in coded.group.roles:
            part = coded.part(role, "shard")
            runs = mapped(len(self.whole), len(part))
            coded.layouts[role] = replace(coded.layouts[role], shard_map=runs)
            self.whole += part
        self.half, self.vaults = len(self.whole) // 2, Vaults(directory, coded, lost)

    def chosen(self, bad: frozenset[BadPart] = frozenset()) -> Restore:
        held = {node: state.inventory() for node, state in self.vaults.states.items()}
        sizes, kept = Sizes(1, (2, 3), grid=Grid()), {1: NO_LIMIT}
        layouts = {role: self.vaults.coded.layouts[role] for role in range(3)}
        query = RestoreQuery(2, SEATS, held, {}, {}, kept, layouts, bad, sizes=sizes)
        found = choose_restore(query)
        assert isinstance(found, Restore), found
        return found

    def cut(self, restore: Restore, epoch: int = 2, key: str = "weight") -> None:
        """Both roles get their bytes, and the rest of their part is zeros."""
        nodes, half = self.vaults.nodes, self.half
        for rank, (role, seat) in enumerate(SEATS.items()):
            own = restore.of_roles([role])
            record = record_of(epoch, nodes, 5, seats=SEATS, restore=own)
            for state in self.vaults.states.values():
                state.adopt(record)
            infos = PartInfo("shard", PADDING + half, (role,)), PartInfo(EXTRAS, 8192, (role,))
            shards = mapped(rank * half, half, PADDING, key)
            layout, state = (
                RoleLayout(role, infos, (role,), 2, "", "", shards),
                self.vaults.states[seat.node],
            )
            segment = slot_memory.ensure_own(state, layout, seat, epoch=epoch)
            segment.data(0, "shard")[:] = b"?" * (PADDING + half)
            found = {
                name: bytes(place.view)
                for name, place in Restorer(state, record, role).obtain(layout).items()
            }
            assert found["shard"] == bytes(PADDING) + self.whole[rank * half : (rank + 1) * half]
            assert found[EXTRAS] == self.vaults.coded.part(0, EXTRAS)


@pytest.fixture
def resized(tmp_path, request):
    resized = Resized(tmp_path, request.param)
    yield resized
    resized.vaults.stop()


@pytest.mark.parametrize("resized", [set(), {1}, {2}], indirect=True, ids=str)
def test_parts_are_cut_from_parts_of_old_roles_whole_or_decoded(resized):
    lost = resized.vaults.lost
    stale = 1 if 2 in lost else 2  # of another model, on the spare
    strange = replace(
        resized.vaults.coded.layouts[stale], layout_hash="x", shard_map=mapped(0, 9**9)
    )
    seal(resized.vaults.directories[4] / f"copy-{stale}.seg", strange, None, {"shard": b"?" * 9})
    resized.vaults.open()
    resized.cut(resized.chosen())
    assert resized.vaults.corruptions() == []
    assert len(resized.vaults.decoded()) == (3 - min(lost) if lost else 0)


@pytest.mark.parametrize("resized", [set()], indirect=True)
def test_no_part_is_sealed_without_proof_of_the_old_parts(resized):
    flip(resized.vaults.own(1), "shard")
    resized.vaults.open()
    with pytest.raises(errors.RestoreUnavailable) as caught:
        resized.cut(resized.chosen())
    assert (caught.value.part, {found[:2] for found in caught.value.tried}) == ("1/shard", {(1, 1)})
    assert not resized.vaults.states[0].table.find(NEW, GENERATION, "shard")
    for state in resized.vaults.states.values():
        state.close(2)
    resized.cut(resized.chosen(frozenset({BadPart(1, 1, GENERATION, "shard")})), epoch=3)


@pytest.mark.parametrize("resized", [set()], indirect=True)
def test_what_old_parts_cannot_give_is_refused_as_the_fault_of_the_size(resized):
    resized.vaults.open()
    with pytest.raises(errors.CutRefused, match="no role of the other size has element 0 of bias"):
        resized.cut(resized.chosen(), key="bias")
