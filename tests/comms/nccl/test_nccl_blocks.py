"""Blocks of coalesced operations come to their end, whenever their epoch is closed.

The thread of an unfinished block launches nothing any more (comms/nccl.py): the fake finds that
at its next attach, a device does not.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from deadpool_megatron.comms import CommunicatorFault, EpochClosed, nccl as blocks
from deadpool_megatron.comms.nccl import RINGS
from fake_nccl import KIND, fake as fake_nccl
from fake_nccl.collected import FreedCommunicatorError
from tests.common.wait import wait_for
from tests.comms.ranks import Member, Ranks, run

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
    with _coalescing_manager(device=CPU, async_ops=True) as block:
        for output in outputs:
            dist.all_gather_single(output, torch.ones(1))
    block.wait()


def closed_in_a_block(member: Member, use: Callable[[Member], None]) -> bool:
    """The epoch is closed between the start of a block and its first operation; on a busy machine
    its thread may not run for longer than a block may last."""
    blocks.MAX_INSIDE_SECONDS = SECONDS
    member.init("nccl", epoch=0)
    use(member)
    dist.barrier()
    closer = close_after_start(member)
    with pytest.raises(EpochClosed):
        use(member)
    closer.join(SECONDS)
    assert member.comms.drain()
    assert member.computes_in(1)
    use(member)
    dist.barrier()
    return True


def after_each_start(act: Callable[[], object]) -> None:
    """Have something happen whenever a block has started; in a process of its own."""
    communicator: Any = fake_nccl.FakeCommunicator
    original = communicator._start_coalescing

    def start(self: Any, device: torch.device) -> None:
        original(self, device)
        act()

    communicator._start_coalescing = start


def close_after_start(member: Member) -> threading.Thread:
    """Close the epoch as soon as the next block has started."""
    closer = threading.Thread(target=member.comms.interrupt, args=(0,))

    def close() -> None:
        if closer.ident is None:
            closer.start()
            while not member.epoch.closed:
                closer.join(0.001)

    after_each_start(close)
    return closer


@pytest.mark.parametrize("use", [batch, several_gathers])
def test_a_close_within_a_block_leaves_no_block_open(use):
    assert all(run(2, closed_in_a_block, use, kind=KIND).values())


def stuck_in_a_block(member: Member) -> bool:
    """A thread that does not come to the end of its block is cut: the process is replaced."""
    member.init("nccl", epoch=0)
    after_each_start(lambda: member.comms.interrupt(0))  # returns when the aborts are over
    with pytest.raises(EpochClosed):
        batch(member)
    assert not member.comms.drain()
    assert "block" in member.comms.unusable_reason
    assert not member.comms.drain(), "and so it stays"
    return True


def test_a_thread_that_is_stuck_in_a_block_costs_its_process():
    assert all(run(2, stuck_in_a_block, kind=KIND).values())


def closed_in_an_operation(member: Member, inside_seconds: float) -> bool:
    """Return whether the process may go on after a close with a thread inside of NCCL."""
    member.init("nccl", epoch=0)
    blocks.MAX_INSIDE_SECONDS = SECONDS if inside_seconds < SECONDS else 0.0

    def lasts(communicator: fake_nccl.FakeCommunicator) -> None:
        threading.Thread(target=member.comms.interrupt, args=(0,)).start()
        until = time.monotonic() + inside_seconds
        while not communicator.aborted and time.monotonic() < until:
            time.sleep(0.01)

    fake_nccl.enqueue_lasts = lasts
    freed = FreedCommunicatorError if inside_seconds == SECONDS else EpochClosed
    with pytest.raises(freed):
        dist.all_reduce(torch.ones(1))
    return member.comms.drain()


@pytest.mark.parametrize(("inside_seconds", "may_go_on"), [(0.5, True), (SECONDS, False)])
def test_an_abort_frees_nothing_that_a_thread_is_in(inside_seconds, may_go_on):
    """Else it waits no longer than a moment, and the process is replaced."""
    assert run(1, closed_in_an_operation, inside_seconds, kind=KIND) == {0: may_go_on}


def connects(member: Member, description: str, in_first_step: bool) -> bool:
    """Rank 0 sends first, and is held as long as the pair is not connected."""
    blocks.MAX_INSIDE_SECONDS = 0.0
    member.init("nccl")
    group: Any = dist.new_group([0, 1], group_desc=description)
    member.attach(0)
    member.comms.allow_long_waits(in_first_step)

    def close() -> None:
        member.order("close").wait(SECONDS)
        threading.Thread(target=member.comms.interrupt, args=(0,)).start()
        wait_for("the close", lambda: member.epoch.closed)
        member.send(("closed", None))

    closer = threading.Thread(target=close)
    if description not in RINGS and member.rank == 0:
        closer.start()
    member.send(("attached", None))
    if member.rank == 1:
        member.order("go").wait(SECONDS)
    peer = 1 - member.rank
    ops = [
        dist.P2POp(dist.isend, torch.ones(2), peer, group=group),
        dist.P2POp(dist.irecv, torch.zeros(2), peer, group=group),
    ]
    with contextlib.suppress(EpochClosed, CommunicatorFault, FreedCommunicatorError):
        dist.batch_isend_irecv(ops)
    if closer.ident is not None:
        closer.join(SECONDS)
    member.send(("enqueued", None))
    member.order("leave").wait(SECONDS)
    return member.comms.drain()


@pytest.mark.parametrize("description", RINGS)
def test_neighbours_in_a_ring_connect_as_their_group_is_made(description):
    with Ranks(2, kind=KIND) as ranks:
        ranks.start(connects, description, False)
        ranks.until_all("attached")
        ranks.receive(0, "enqueued", SECONDS)
        ranks.send(1, "order", "go")
        ranks.receive(1, "enqueued")
        ranks.order_all("leave")
        assert all(ranks.results().values())


@pytest.mark.parametrize("in_first_step", [True, False])
def test_a_pair_may_connect_in_the_first_step_and_waits_meanwhile(in_first_step):
    """So a close in it waits for a late peer; in later steps no pair connects."""
    limits = {"long_operation_seconds": SECONDS, "drain_seconds": SECONDS}
    with Ranks(2, kind=KIND, **limits, close_wait_seconds=0.1) as ranks:
        ranks.start(connects, "OTHER", in_first_step)
        ranks.until_all("attached")
        ranks.until_held_up(0)
        ranks.send(0, "order", "close")
        ranks.receive(0, "closed")
        ranks.send(1, "order", "go")
        ranks.until_all("enqueued")
        ranks.order_all("leave")
        assert ranks.results()[0] is in_first_step
