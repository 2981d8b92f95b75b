"""Bytes are taken by what they mean: those of another model of the same sizes nowhere are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from immutables import Map
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.hooks.generations.layouts import role_layout
from deadpool_megatron.hooks.loop import layer_number, model_config
from deadpool_megatron.hooks.pretraining.stages import shift_layers
from deadpool_megatron.hooks.training_state.identity import identify, role_meaning
from deadpool_megatron.hooks.training_state.optimizer import ShardState, complete_state
from deadpool_megatron.layout.decision import RestoreQuery
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.meanings import difference
from deadpool_megatron.layout.part_kinds import extras_part
from deadpool_megatron.layout.places.parity import ParityGroup, parity_layout, parity_role
from deadpool_megatron.layout.records import (
    Generation,
    Holding,
    Inventory,
    Restore,
    RoleLayout,
    Seat,
)
from deadpool_megatron.persist.skeleton import (
    Skeleton,
    SkeletonError,
    read_skeleton,
    write_skeleton,
)
from deadpool_megatron.recovery.plan import choose_restore
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.core import room
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.disk.dump_contents import (
    dump_differs,
    dumped_decodings,
    taken_of_dump,
)
from deadpool_megatron.vault.disk.whole_dumps import last_boundary
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.memory.budget import Budget
from deadpool_megatron.vault.role.restore import Obtainer
from deadpool_megatron.vault.shm.names import dump_name, own_name
from deadpool_megatron.vault.shm.own_slots import make_own, park
from deadpool_megatron.vault.shm.segment import Segment, checksum
from tests.cluster.machine.rig import Rig
from tests.trainer.layouts import BF16, MODEL, MOE, PP2, TP2, make_loop

NEWEST, EXTRAS, SHARD = Generation(1, 7), extras_part("step"), "shard0"
SEAT = Seat(0, 0, 0)
# Flags of two ranks; the first pair is of one model.
MODELS = {
    "base": PP2,
    "equal": PP2,
    "heads": f"{PP2} --num-attention-heads 8",
    "virtual": f"{PP2} --num-layers-per-virtual-pipeline-stage 1",
    "swapped": PP2,
    "renumbered": PP2,
    "norms": PP2,
    "cut": f"{TP2} --sequence-parallel",
    "frozen": PP2,
    "plain": "",
    "sharded": BF16,
    "experts": MOE,
}
OTHERS = {
    "heads": "num_attention_heads is 4 there and 8 here",
    "norms": "normalization is LayerNorm there and RMSNorm here",
    "virtual": "virtual-stages is 1 there and 2 here",
    "cut": "tensor-rank is none there and 0/2 here",
    "swapped": "layers is 1-2 there and 2,1 here",
    "renumbered": "layers is 1-2 there and 3-4 here",
    "exchanged": "pipeline-rank is 0/2 there and 1/2 here",
}
Layouts = dict[int, RoleLayout]


def described(role: int, arguments: str) -> Iterator[tuple[str, RoleLayout]]:
    """The layouts of a role of two in each of the models; nobody answers it."""
    dist.init_process_group("fake", store=FakeStore(), rank=role, world_size=2)
    for name, flags in MODELS.items():
        loop, _ = make_loop(f"{arguments} {flags}")
        if name == "swapped":
            modules = [m for chunk in loop.model_chunks for m in chunk.named_modules()]
            layers: list[Any] = [one for path, one in modules if layer_number(path, one)]
            numbers = [one.layer_number for one in layers]
            for layer, number in zip(layers, reversed(numbers), strict=True):
                layer.layer_number = number
        elif name == "renumbered":
            shift_layers(loop.model_chunks, [2])
        elif name == "norms":
            model_config(loop).normalization = "RMSNorm"
        elif name == "frozen":
            next(loop.model_chunks[0].parameters()).requires_grad = False
        complete_state(loop.optimizer)
        parts = ShardState(loop.optimizer).parts
        identify(loop, parts)
        yield name, role_layout(role, parts, 64 << 10, [0, 1], 2, role_meaning(loop))
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def layouts(text: str) -> dict[str, Layouts]:
    ranks = [dict(described(role, f"{MODEL} {text}")) for role in (0, 1)]
    torch.use_deterministic_algorithms(False)  # as it was
    found = {name: dict(enumerate(rank[name] for rank in ranks)) for name in MODELS}
    exchanged = {role: replace(one, role=1 - role) for role, one in found["base"].items()}
    return {**found, "exchanged": {one.role: one for one in exchanged.values()}}


def peers(own: RoleLayout, other: RoleLayout) -> Layouts:
    """Role 0 as it is, and role 1 that is said to hold the same bytes of its shard."""
    same, rest = replace(own.parts[0], replicas=(0, 1)), own.parts[1:]
    shared = replace(other.parts[0], replicas=(0, 1)), *other.parts[1:]
    return {0: replace(own, parts=(same, *rest)), 1: replace(other, role=1, parts=shared)}


def coded(kept: Layouts) -> RoleLayout:
    group = ParityGroup((0, 1), (parity_role((0, 1), 1, 0),), (2,))
    return parity_layout(kept, group, 0, 1)


def decided(own: Layouts, held: list[RoleLayout], without: int | None = None) -> bool:
    """Whether the planner finds the generation in memory; ``without`` the shard of a role."""
    inventories = {
        node: Inventory(
            node,
            1,
            (Holding(one.role, NEWEST, names(one, without)),),
            (one,),
        )
        for node, one in enumerate(held)
    }
    seats = {role: Seat(role, 0, 0) for role in own}
    query = RestoreQuery(2, 2, inventories, seats, seats, {1: NO_LIMIT}, layouts=own)
    return isinstance(choose_restore(query), Restore)


def names(layout: RoleLayout, without: int | None) -> frozenset[str]:
    found = {part.name for part in layout.parts}
    return frozenset(found - {SHARD} if layout.role == without else found)


def written(folder: Path, held: list[RoleLayout], without: int | None = None) -> list[Segment]:
    """Dump files of these roles; ``without`` the shard of one."""
    found = []
    for one in held:
        file = Segment.create(folder / dump_name(one.role, 0), one, None, ())
        file.open_slot(0, NEWEST, 1)
        for name in names(one, without):
            file.seal_part(0, name, 0, checksum(memoryview(b"")), 1)
        found.append(file)
    return found


def accepted(run: Callable[[], object], refusal: type[Exception]) -> bool:
    try:
        run()
    except refusal:
        return False
    return True


def from_a_file(folder: Path, dumped: RoleLayout, own: RoleLayout) -> bool:
    (file,) = written(folder, [dumped])
    restoring = cast(Any, SimpleNamespace(_record=SimpleNamespace(restore=SimpleNamespace())))
    restoring._record.restore.generation = NEWEST
    return Obtainer._slot_of(restoring, file, own, own.parts[0], NEWEST)[0] == 0


def started_again(kept: RoleLayout, own: RoleLayout) -> bool:
    rig = Rig(nodes=2, spares=0).run()
    rig.alter("memory", layouts=Map({0: kept}), inherited=frozenset({0}))
    rig.feed(ev.MemberRegistered(*rig.seat(0), own))
    return not rig.of(act.Finish)


def kept_for_another(folder: Path, kept: RoleLayout, own: RoleLayout) -> bool:
    state = VaultState(0, folder, Settings(), lambda _: None)
    state.ensure_copy(kept)
    return accepted(lambda: state.ensure_copy(own), VaultError)


def slots_of_its_own(folder: Path, kept: RoleLayout, own: RoleLayout) -> bool:
    Segment.create(folder / own_name(0, SEAT), kept, SEAT, ())
    state = VaultState(0, folder, Settings(), lambda _: None)
    return accepted(lambda: room.ensure_own(state, own, SEAT), VaultError)


def exported(folder: Path, kept: RoleLayout, own: RoleLayout) -> bool:
    write_skeleton(folder, Skeleton(0, kept.layout_hash, objects={}, common={}))
    return accepted(lambda: read_skeleton(folder, 0, own.layout_hash), SkeletonError)


def exported_from_a_peer(folder: Path, kept: RoleLayout, own: RoleLayout) -> bool:
    written(folder, [*peers(own, kept).values()], 0)
    return accepted(lambda: taken_of_dump(folder, 0, NEWEST, "step"), VaultError)


def whole_with_a_peer(folder: Path, kept: RoleLayout, own: RoleLayout) -> bool:
    written(folder, [*peers(own, kept).values()], 0)
    return last_boundary(folder, NEWEST, 2)[0] is not None


def decoded_from_files(folder: Path, kept: Layouts, own: Layouts) -> bool:
    written(folder, [*own.values(), coded(kept)], 0)
    return bool(dumped_decodings(folder, 0, SHARD, NEWEST.iteration))


# Every way for bytes to become a role's, with what was kept and the role as it is now.
WAYS: dict[str, Callable[[Path, Layouts, Layouts], bool]] = {
    "memory": lambda _, kept, own: decided(own, [*kept.values()]),
    "memory of a peer": lambda _, kept, own: decided(
        both := peers(own[0], kept[0]), [*both.values()], 0
    ),
    "parity": lambda _, kept, own: decided(own, [*own.values(), coded(kept)], 0),
    "started again": lambda _, kept, own: started_again(kept[0], own[0]),
    "dump": lambda at, kept, own: not (written(at, [kept[0]]) and dump_differs(at, own[0])),
    "file": lambda at, kept, own: from_a_file(at, kept[0], own[0]),
    "file of a peer": lambda at, kept, own: from_a_file(at, replace(kept[0], role=1), own[0]),
    "dump with a peer": lambda at, kept, own: whole_with_a_peer(at, kept[0], own[0]),
    "dump with parity": decoded_from_files,
    "own slots": lambda at, kept, own: slots_of_its_own(at, kept[0], own[0]),
    "copies": lambda at, kept, own: kept_for_another(at, kept[0], own[0]),
    "export": lambda at, kept, own: exported(at, kept[0], own[0]),
    "export of a dump": lambda at, kept, own: exported_from_a_peer(at, kept[0], own[0]),
}


@pytest.mark.parametrize("way", WAYS)
def test_bytes_of_the_same_model_only_are_taken(
    layouts: dict[str, Layouts], way: str, tmp_path: Path
) -> None:
    taken = []
    for name in ("equal", *OTHERS):
        (folder := tmp_path / name).mkdir()
        if WAYS[way](folder, layouts["base"], layouts[name]):
            taken.append(name)
    assert taken == ["equal"]


def test_the_difference_is_named(layouts: dict[str, Layouts]) -> None:
    base = layouts["base"][0]
    assert {name: difference(base, layouts[name][0]) for name in OTHERS} == OTHERS
    assert "frozen is none there" in difference(base, layouts["frozen"][0])
    before = replace(base, meaning="", layout_hash="")
    assert "go on with that version" in difference(before, base)
    other = replace(base, parts=(replace(base.parts[0], identity="another"), *base.parts[1:]))
    assert "part shard0 is of other parameters" in difference(other, base)


def test_peers_hold_the_same_bytes_if_they_mean_the_same(layouts: dict[str, Layouts]) -> None:
    """All of them without the distributed optimizer; of the experts of one rank no other does."""
    one, other = layouts["plain"].values()
    assert other.has(one.parts[0])
    assert one.layout_hash != other.layout_hash
    one, other = layouts["sharded"].values()
    assert not other.has(one.parts[0])
    one, other = layouts["experts"].values()
    assert [other.has(part) for part in one.parts[:2]] == [True, False]


@pytest.mark.parametrize("name", OTHERS)
def test_parked_slots_take_the_meaning_of_the_role(
    layouts: dict[str, Layouts], name: str, tmp_path: Path
) -> None:
    own, path = layouts[name][0], tmp_path / own_name(0, SEAT)
    park(tmp_path, layouts["base"][0], SEAT, Budget(tmp_path), None)
    make_own(path, own, SEAT, Budget(tmp_path), None)
    assert Segment.open(path).layout == own
