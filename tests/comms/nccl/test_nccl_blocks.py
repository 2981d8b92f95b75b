"""Blocks of coalesced operations come to their end, whenever their epoch is closed.

One that is left half way makes its thread launch nothing any more (comms/nccl/blocks.py): that is
found at the next attach of the fake, and would on a device be found by nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.comms.nccl import blocks
from deadpool_megatron.comms.nccl.blocks import Blocks
from fake_nccl import KIND
from fake_nccl import fake as fake_nccl
from tests.comms.ranks import Member, run

pytestmark = pytest.mark.slow
SECONDS = 20.0
CPU = torch.device("cpu")


def batch(member: Member) -> None:
    peer = (member.rank + 1) % member.size
    ops = [
        dist.P2POp(dist.isend, torch.ones(2), peer),
        dist.P2POp(dist.irecv, torch.zeros(2), peer),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def several_gathers(member: Member) -> None:
    """As TransformerEngine's quantised gathers: c10d's manager with a device, no finally in it."""
    outputs = [torch.zeros(member.size) for _ in range(2)]
    with c10d._coalescing_manager(device=CPU, async_ops=True) as block:
        for output in outputs:
            dist.all_gather_single(output, torch.ones(1))
    block.wait()


def closed_in_a_block(member: Member, use: Callable[[Member], None]) -> bool:
    """The epoch is closed between the start of a block and its first operation; on a busy machine
    its thread may not run for longer than a block may last."""
    blocks.LONGEST_SECONDS = SECONDS
    member.init("nccl", epoch=0)
    use(member)
    dist.barrier()
    closer = close_after_start(member)
    with pytest.raises(EpochClosed):
        use(member)
    closer.join(SECONDS)
    assert member.comms.drain()
    member.attach(1)
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == member.size
    use(member)
    dist.barrier()
    return True


def close_after_start(member: Member) -> threading.Thread:
    """Have the next block that starts see its epoch closed before it goes on."""
    original = fake_nccl.FakeCommunicator._start_coalescing
    closer = threading.Thread(target=member.comms.interrupt, args=(0,))
    communicator: Any = fake_nccl.FakeCommunicator

    def start(self: Any, device: torch.device) -> None:
        communicator._start_coalescing = original
        original(self, device)
        closer.start()
        while not member.comms.interrupted:
            closer.join(0.001)

    communicator._start_coalescing = start
    return closer


@pytest.mark.parametrize("use", [batch, several_gathers])
def test_a_close_within_a_block_leaves_no_block_open(use: Callable[[Member], None]) -> None:
    assert all(run(2, closed_in_a_block, use, kind=KIND).values())


def stuck_in_a_block(member: Member) -> bool:
    """A thread that does not come to the end of its block is cut: the process is replaced."""
    member.init("nccl", epoch=0)
    original = fake_nccl.FakeCommunicator._start_coalescing
    communicator: Any = fake_nccl.FakeCommunicator

    def start(self: Any, device: torch.device) -> None:
        original(self, device)
        member.comms.interrupt(0)  # returns when the aborts are over

    communicator._start_coalescing = start
    with pytest.raises(EpochClosed):
        batch(member)
    assert not member.comms.drain()
    assert "block" in member.comms.ruin
    assert not member.comms.drain(), "and so it stays"
    return True


def test_a_thread_that_is_stuck_in_a_block_costs_its_process() -> None:
    assert all(run(2, stuck_in_a_block, kind=KIND).values())


def wrong_in_a_block(member: Member) -> bool:
    """A mistake of the caller is told after the end of the block."""
    member.init("nccl", epoch=0)
    peer = 1 - member.rank
    wrong = dist.P2POp(dist.irecv, torch.zeros(1), peer)
    wrong.tensor = None
    with pytest.raises(TypeError):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(1), peer), wrong])
    assert fake_nccl.collected.depth == 0
    arrived = torch.zeros(1)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, arrived, peer)]):
        work.wait()
    return bool(arrived.item() == 1.0)


def test_a_mistake_in_a_batch_leaves_no_block_open() -> None:
    assert all(run(2, wrong_in_a_block, kind=KIND).values())


def test_an_abort_waits_until_no_block_is_open() -> None:
    blocks = Blocks(lambda: False)
    assert blocks.enter()
    assert blocks.enter()
    aborted = threading.Event()

    def abort() -> None:
        blocks.close()
        aborted.set()

    threading.Thread(target=abort).start()
    first = RuntimeError("the first")
    blocks.keep(first)
    blocks.keep(RuntimeError("the second"))
    assert blocks.leave() is None
    assert blocks.is_open_here()
    assert blocks.leave() is first
    assert not blocks.is_open_here()
    assert aborted.wait(SECONDS)
    assert not blocks.enter(), "nothing begins after that"


def test_a_block_within_a_block_may_begin_while_an_abort_waits() -> None:
    blocks = Blocks(lambda: False)
    assert blocks.enter()
    blocks.close()
    assert blocks.cut
    assert blocks.enter()
    assert blocks.leave() is None
    assert blocks.leave() is None


def test_a_thread_that_is_in_a_group_already_begins_nothing() -> None:
    blocks = Blocks(lambda: True)
    assert "left it open" in blocks.begin("send")
    assert "left it open" in blocks.ruin()
