"""Bases on real Megatron optimizers: what a peer keeps, with low halves, is the owner's masters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.layouts import BF16, BUCKETS, PP2, make_loop, steps
from tests.trainer.layouts import text as text  # a fixture
from tests.trainer.ranks import run_ranks

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1"
    " --global-batch-size 4 --lr 1e-2 --train-iters 6 --seed 11"
)
# The shard of the experts has other peers than the dense one: it travels whole.
MOE = "--num-experts 4 --expert-model-parallel-size 2"


class Slot:
    """Plays SlotWriter."""

    def __init__(self, layout: Any) -> None:
        self.parts = {part.name: memoryview(bytearray(part.nbytes)) for part in layout}

    def part(self, name: str) -> memoryview:
        return self.parts[name]


def put_together(arguments: str) -> list[str]:
    """Train; then make every peer's shard from what this rank keeps and the peer's low halves.
    Answers the names of the parts that were made."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from deadpool_megatron.hooks.bases import BaseKeeper
    from deadpool_megatron.hooks.optimizer import ShardState, complete_state
    from deadpool_megatron.layout.bases import MASTERS_PART, base_part, unpack_masters
    from deadpool_megatron.platform.cpu import CpuPlatform
    from deadpool_megatron.vault.compaction import Splitter, join_in_place, low_places

    loop, _ = make_loop(arguments)
    complete_state(loop.optimizer)
    shard = ShardState(loop.optimizer)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    peers, role = dist.get_process_group_ranks(group), dist.get_rank()
    others = [peer for peer in peers if peer != role]
    keeper = BaseKeeper(loop.optimizer, shard, CpuPlatform(), peers, len(others))
    slot = Slot(keeper.layout_parts(role))
    keeper.begin(others)
    for _ in range(2):
        steps(loop, 1)
        sizes, copies = keeper.finish(slot)  # type: ignore[arg-type]
        assert all(copy.wait(10.0) for copy in copies)
        assert sizes.keys() == slot.parts.keys()

        masters = unpack_masters(slot.part(MASTERS_PART)[: sizes[MASTERS_PART]])
        mine: dict[str, tuple[bytes, Any, bytes, Any]] = {}
        for part in shard.parts:
            if part.name not in masters:
                continue
            content = bytearray(part.nbytes)
            for view, live in zip(part.views(memoryview(content)), part.tensors, strict=True):
                view.copy_(live)
            one = masters[part.name]
            one.check(part.nbytes)
            splitter = Splitter(memoryview(content), one)
            low = b"".join(bytes(piece) for piece in splitter.pieces())
            mine[part.name] = bytes(content), one, low, splitter.exceptions
        theirs: list[Any] = [None] * len(peers)
        dist.all_gather_object(theirs, mine, group)
        for number, peer in enumerate(others):
            for whole, one, low, exceptions in theirs[peers.index(peer)].values():
                made = bytearray(len(whole))
                for begin, end in one.gaps(len(whole)):
                    made[begin:end] = whole[begin:end]
                for begin, end in low_places(one):
                    made[begin:end], low = low[: end - begin], low[end - begin :]
                base = slot.part(base_part(number))[: sizes[base_part(number)]]
                join_in_place(memoryview(made), one, base, exceptions)
                assert made == whole
                # All masters: a third of the state but for the gaps between parameters.
                assert 4 * one.count > len(whole) / 3.5
    return sorted(masters)


@pytest.mark.parametrize("flags", [f"{PP2} {BF16} {BUCKETS}", f"{BF16} {MOE}"])
def test_peers_keep_the_weights_of_each_owner(flags: str, text: str) -> None:
    found = run_ranks(4, put_together, f"{TINY} {text} {flags}")
    assert found == [["shard0"]] * 4


def build(arguments: str) -> str:
    """What is said of an optimizer that has nothing to offer."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from deadpool_megatron.hooks.bases import BaseKeeper
    from deadpool_megatron.hooks.optimizer import (
        ShardState,
        UnsupportedOptimizer,
        complete_state,
    )
    from deadpool_megatron.platform.cpu import CpuPlatform

    loop, _ = make_loop(arguments)
    complete_state(loop.optimizer)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    peers = dist.get_process_group_ranks(group)
    try:
        BaseKeeper(loop.optimizer, ShardState(loop.optimizer), CpuPlatform(), peers, 1)
    except UnsupportedOptimizer as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--use-distributed-optimizer", "no part has fp32 masters of bfloat16 weights"),
        (f"{PP2} {BF16}", "there are no data-parallel peers"),
    ],
)
def test_what_has_nothing_to_offer_is_refused(flags: str, why: str, text: str) -> None:
    for said in run_ranks(2, build, f"{TINY} {text} {flags}"):
        assert said.startswith(f"--deadpool-compaction on: {why}"), said
        assert said.endswith("use --deadpool-compaction off")


@pytest.mark.parametrize(
    ("inner", "why"),
    [
        (SimpleNamespace(), "only the distributed optimizer"),
        (SimpleNamespace(ddp_config=SimpleNamespace(overlap_param_gather=True)), "in the next one"),
    ],
)
def test_weights_that_come_late_or_never_are_refused(
    inner: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deadpool_megatron.hooks import bases
    from deadpool_megatron.hooks.optimizer import UnsupportedOptimizer

    monkeypatch.setattr(bases, "is_distributed", lambda one: hasattr(one, "ddp_config"))
    with pytest.raises(UnsupportedOptimizer, match=why):
        bases.refuse_without_masters([inner], [0, 1])


def test_peers_that_nobody_keeps_weights_of_are_told_once() -> None:
    """All of a group sit on one node, and its buddy has none of them."""
    from deadpool_megatron.hooks.bases import owners_of
    from deadpool_megatron.settings import Settings
    from tests.layout.test_bases import record

    on = Settings(compaction="on")
    apart, together = record({0: 0, 1: 1}, 1, 0), record({0: 0, 1: 0, 2: 1, 3: 1}, 1, 0)
    assert owners_of(apart, 0, (0, 1), on) == ((1,), "")
    assert owners_of(apart, 0, (0, 1), Settings()) == ((), "")
    owners, warning = owners_of(together, 0, (0, 1), on)
    assert owners == ()
    assert "the state of roles 0, 1 travels whole" in warning
    assert owners_of(together, 1, (0, 1), on) == ((), "")


def test_a_tensor_of_a_part_is_found_by_its_address() -> None:
    from deadpool_megatron.state.packing import Part

    whole = torch.arange(40.0)
    part = Part("shard0", [torch.zeros(3), whole], (0,))
    assert part.offset_of(whole[8:]) == 64 + 32
    for foreign in (torch.zeros(2), whole[40:]):
        with pytest.raises(KeyError):
            part.offset_of(foreign)
