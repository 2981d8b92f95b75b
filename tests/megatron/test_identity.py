"""Bytes are taken by what they mean: those of another model of the same sizes nowhere are."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.layout.descriptions import difference
from deadpool_megatron.layout.history import NO_LIMIT
from deadpool_megatron.layout.parity_groups import ParityGroup, parity_layout
from deadpool_megatron.layout.planner import RestoreQuery, choose_restore
from deadpool_megatron.layout.records import Generation, Holding, Inventory, RoleLayout, Seat
from deadpool_megatron.megatron.identity import identify, role_meaning
from deadpool_megatron.megatron.loop import layer_number, model_config
from deadpool_megatron.megatron.optimizer import ShardState, complete_state
from deadpool_megatron.megatron.pretraining.stages import shift_layers
from deadpool_megatron.member.role_layout import role_layout
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault import slot_memory
from deadpool_megatron.vault.disk import sources
from deadpool_megatron.vault.disk.sources import last_boundary
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.restore import Restorer
from deadpool_megatron.vault.shm.segment import Segment, checksum, copy_name, dump_name, own_name
from tests.cluster.machine.rig import Rig
from tests.trainer.layouts import BF16, MODEL, MOE, PP2, TP2, make_loop
from tests.vault.slots import SlotStore, scheme_of

NEWEST, SHARD, SEAT = Generation(1, 7), "shard0", Seat(0, 0, 0)
# Of two ranks; PP2 for all others.
FLAGS = {
    "heads": f"{PP2} --num-attention-heads 8",
    "virtual": f"{PP2} --num-layers-per-virtual-pipeline-stage 1",
    "cut": f"{TP2} --sequence-parallel",
    "plain": "",
    "sharded": BF16,
    "experts": MOE,
}
# In what role 0 differs from that of "base".
OTHERS = {
    "heads": "num_attention_heads is 4 there and 8 here",
    "norms": "normalization is LayerNorm there and RMSNorm here",
    "virtual": "virtual_stages is 1 there and 2 here",
    "cut": "tensor_model_parallel_rank is 0/1 there and 0/2 here",
    "swapped": "layers is 1-2 there and 2,1 here",
    "renumbered": "layers is 1-2 there and 3-4 here",
    "exchanged": "pipeline_model_parallel_rank is 0/2 there and 1/2 here",
}
Layouts = dict[int, RoleLayout]


def described(role: int, arguments: str) -> Iterator[tuple[str, RoleLayout]]:
    """Yield the layouts of a role of two in each of the models, built without the other role."""
    for name in ("base", "equal", "frozen", *FLAGS, *(OTHERS.keys() - FLAGS.keys())):
        rank = 1 - role if name == "exchanged" else role
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
        loop, _ = make_loop(f"{arguments} {FLAGS.get(name, PP2)}")
        if name == "swapped":
            modules = loop.model_chunks[0].named_modules()
            layers: list[Any] = [module for path, module in modules if layer_number(path, module)]
            numbers = layers[1].layer_number, layers[0].layer_number
            layers[0].layer_number, layers[1].layer_number = numbers
        elif name == "renumbered":
            shift_layers(loop.model_chunks, [2])
        elif name == "norms":
            model_config(loop).normalization = "RMSNorm"
        elif name == "frozen":
            next(loop.model_chunks[0].parameters()).requires_grad = False
        complete_state(loop.optimizer)
        identify(loop, parts := ShardState(loop.optimizer).parts)
        yield name, role_layout(role, parts, 64 << 10, [0, 1], 2, role_meaning(loop))
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models():
    data = f"--data {__file__}"
    first, second = (dict(described(role, f"{MODEL} {data}")) for role in (0, 1))
    torch.use_deterministic_algorithms(False)  # as it was
    return {name: {0: first[name], 1: second[name]} for name in first}


def peers(own: RoleLayout, other: RoleLayout) -> list[RoleLayout]:
    """Return role 0 as it is, and role 1 as a replica of its shard."""
    return [
        replace(one, role=role, parts=(replace(one.parts[0], replicas=(0, 1)), *one.parts[1:]))
        for role, one in enumerate((own, other))
    ]


def coded(layouts: Layouts) -> RoleLayout:
    """The block that role 0 can be computed from, with role 1."""
    return parity_layout(layouts, ParityGroup((0, 1), (1 << 32,), (2,)), 0, 1)


def held(layout: RoleLayout, lacks: int | None) -> frozenset[str]:
    names = frozenset(part.name for part in layout.parts)
    return names - {SHARD} if layout.role == lacks else names


def in_memory(own: Layouts, layouts: Iterable[RoleLayout], lacks: int | None = None) -> bool:
    """Whether roles get their state from nodes with these layouts; one ``lacks`` its own shard."""
    found = {
        node: Inventory(node, 1, (Holding(one.role, NEWEST, held(one, lacks)),), (one,))
        for node, one in enumerate(layouts)
    }
    query = RestoreQuery(2, range(2), found, {0: SEAT}, {0: SEAT}, {1: NO_LIMIT}, layouts=own)
    return hasattr(choose_restore(query), "sources")


def dump(folder: Path, layouts: Iterable[RoleLayout], lacks: int | None = None) -> Path:
    for one in layouts:
        file = Segment.create(folder / dump_name(one.role, 0), one, None, ())
        file.open_slot(0, NEWEST, 1)
        for name in held(one, lacks):
            file.seal_part(0, name, 0, checksum(memoryview(b"")), 1)
    return folder


def loaded(folder: Path, dumped: RoleLayout, own: RoleLayout) -> bool:
    file = Segment.open(dump(folder, [dumped]) / dump_name(dumped.role, 0))
    self: Any = SimpleNamespace(_generation=NEWEST)
    wanted: Any = SimpleNamespace(name=SHARD)
    return Restorer._look_in(self, file, own, wanted)[0]


def started_again(kept: RoleLayout, own: RoleLayout) -> bool:
    rig = Rig(nodes=2, spares=0).run()
    rig.alter("memory", layouts={0: kept}, inherited=frozenset({0}))
    rig.feed(ev.MemberRegistered(*rig.seat(0), own))
    return not rig.of(act.Finish)


def passes(call: Callable[..., object], *arguments: object) -> bool:
    try:
        call(*arguments)
    except VaultError:
        return False
    return True


def vault(folder: Path, name: str, kept: RoleLayout) -> SlotStore:
    """Return a vault that has this file."""
    Segment.create(folder / name, kept, None, ())
    state = SlotStore(scheme_of, 0, folder, Settings(), print)
    state.attach(name)
    return state


# Every way for bytes to become a role's: a folder, what was kept, and the roles as they are now.
WAYS: dict[str, Callable[[Path, Layouts, Layouts], bool]] = {
    "memory": lambda at, kept, own: in_memory(own, kept.values()),
    "memory of a peer": lambda at, kept, own: in_memory(
        dict(enumerate(peers(own[0], kept[0]))), peers(own[0], kept[0]), 0
    ),
    "parity": lambda at, kept, own: in_memory(own, [*own.values(), coded(kept)], 0),
    "started again": lambda at, kept, own: started_again(kept[0], own[0]),
    "dump": lambda at, kept, own: not sources.dump_difference(dump(at, kept.values()), own[0]),
    "file": lambda at, kept, own: loaded(at, kept[0], own[0]),
    "file of a peer": lambda at, kept, own: loaded(at, replace(kept[0], role=1), own[0]),
    "dump with a peer": lambda at, kept, own: bool(
        last_boundary(dump(at, peers(own[0], kept[0]), 0), NEWEST, range(2))[0]
    ),
    "dump with parity": lambda at, kept, own: bool(
        sources.dumped_parts(
            dump(at, [*own.values(), coded(kept)], 0), NEWEST, range(2)
        ).alternatives(0, SHARD, NEWEST)
    ),
    "export of a dump": lambda at, kept, own: passes(
        sources.snapshot_of_dump, dump(at, peers(own[0], kept[0]), 0), 0, NEWEST, "step"
    ),
    "slots": lambda at, kept, own: passes(
        slot_memory.ensure_own, vault(at, own_name(0, SEAT), kept[0]), own[0], SEAT
    ),
    "copies": lambda at, kept, own: passes(
        slot_memory.ensure_copy, vault(at, copy_name(0), kept[0]), own[0], NEWEST
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_only_bytes_of_the_same_model_are_accepted(models, way, tmp_path):
    taken = []
    for name in ("equal", *OTHERS):
        (folder := tmp_path / name).mkdir()
        taken += [name] if WAYS[way](folder, models["base"], models[name]) else []
    assert taken == ["equal"]


def test_difference_is_named(models):
    base = models["base"][0]
    assert {name: difference(base, models[name][0]) for name in OTHERS} == OTHERS
    assert "frozen is 0 there" in difference(base, models["frozen"][0])
    other = replace(base, parts=(replace(base.parts[0], identity="another"), *base.parts[1:]))
    assert "part shard0 is of other parameters" in difference(other, base)


def test_peers_hold_the_same_bytes_if_they_mean_the_same(models):
    """All peers without the distributed optimizer; no peer those of the experts of a rank."""
    one, other = models["plain"].values()
    assert other.has(one.parts[0])
    assert one.layout_hash != other.layout_hash
    assert not models["sharded"][1].has(models["sharded"][0].parts[0])
    one, other = models["experts"].values()
    assert [other.has(part) for part in one.parts[:2]] == [True, False]
