"""What an abort of NCCL's reaches, and what it leaves behind, played by the fake."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.comms.nccl import fake as fake_nccl
from tests.waiting import wait_for

from .ranks import DEADLINE_SECONDS, Member, Ranks, run

pytestmark = pytest.mark.slow
KIND = "fake-nccl"


class SetUp:
    """Communicators are set up when the test says so; whoever does is told of."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.release = threading.Event()
        self.communicators: list[fake_nccl.FakeCommunicator] = []
        fake_nccl.set_up = self

    def __call__(self, communicator: fake_nccl.FakeCommunicator) -> None:
        self.communicators.append(communicator)
        self.begun.set()
        assert self.release.wait(DEADLINE_SECONDS)


def attach_and_close(member: Member, epoch: int) -> SetUp:
    """The epoch is closed while its first communicator is set up."""
    hanging = SetUp()

    def close() -> None:
        hanging.begun.wait(DEADLINE_SECONDS)
        member.comms.interrupt(epoch)

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(EpochClosed):
        member.attach(epoch)
    closer.join(DEADLINE_SECONDS)
    return hanging


def late_set_up(member: Member) -> bool:
    member.init("nccl")
    hanging = attach_and_close(member, 0)
    assert member.comms.drain(), "once may be bad luck"
    (late,) = hanging.communicators
    assert not late.aborted
    hanging.release.set()
    wait_for("the abort of a communicator that came up late", lambda: late.aborted)
    wait_for("the end of its thread", lambda: not builders())
    # The process is as good as new.
    fake_nccl.set_up = lambda communicator: None
    member.attach(1)
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item() == 1.0


def builders() -> list[str]:
    """Threads that make communicators, or made some and wait for more."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name == "deadpool-waiter"]


def test_a_communicator_that_comes_up_after_the_close_is_aborted() -> None:
    assert run(1, late_set_up, kind=KIND)[0]


def hung_set_ups(member: Member) -> bool:
    member.init("nccl")
    first = attach_and_close(member, 0)
    assert member.comms.drain()
    second = attach_and_close(member, 1)
    assert not member.comms.drain()
    assert "2 threads" in member.comms.ruin
    first.release.set()
    second.release.set()
    return True


def test_two_threads_that_hang_in_a_set_up_cost_their_process() -> None:
    assert run(1, hung_set_ups, kind=KIND)[0]


PENDING = 3


def abort_with_pending_operations(member: Member) -> bool:
    """An abort lasts longer with every operation that is pending, and the drain waits for it."""
    lasted: list[float] = []
    looked = threading.Event()
    member.init("nccl")
    member.attach(0)
    if member.rank == 1:
        member.order("go").wait(DEADLINE_SECONDS)
        return True
    for _ in range(PENDING):
        dist.all_reduce(torch.ones(1))  # nobody answers

    def lasts(seconds: float) -> None:
        lasted.append(seconds)
        assert looked.wait(DEADLINE_SECONDS)

    fake_nccl.abort_lasts = lasts
    threading.Thread(target=member.comms.interrupt, args=(0,), daemon=True).start()
    wait_for("the abort", lambda: lasted)
    group = member.comms._current
    assert group is not None
    fabric, may_write = group.fabrics[0], group.may_write

    def look() -> bool:
        found = may_write()
        assert looked.is_set() or found, "an abort is still under way"
        looked.set()
        return found

    group.may_write = look  # type: ignore[method-assign]
    assert fabric.aborting()
    assert member.comms.drain()
    assert not fabric.aborting()
    member.say(("drained", None))
    per_operation = fake_nccl.ABORT_SECONDS_PER_OPERATION
    return lasted == [fake_nccl.ABORT_SECONDS + PENDING * per_operation]


def test_aborts_last_and_the_drain_waits_for_them() -> None:
    with Ranks(2, kind=KIND) as ranks:
        ranks.start(abort_with_pending_operations)
        ranks.hear(0, "drained")
        ranks.say(1, "order", "go")
        assert all(ranks.results().values())


def peer_dies(member: Member) -> bool:
    """The watchdog sees a dead peer before anybody has closed the epoch."""
    member.init("nccl")
    member.attach(0)
    dist.barrier()
    value = torch.ones(1)
    member.say(("ready", None))
    if member.rank == 1:
        member.order("never").wait(DEADLINE_SECONDS)
    work: Any = dist.all_reduce(value, async_op=True)
    wait_for("the watchdog", work.exception)
    assert not member.faults, "nobody has waited yet"

    def close() -> None:
        wait_for("the report of the fault", lambda: member.faults)
        member.comms.interrupt(0)

    threading.Thread(target=close).start()
    with pytest.raises(EpochClosed):
        work.wait()
    ((_, operation, _),) = member.faults
    assert operation == "allreduce"
    # Nor can the next operation be enqueued, and it is no fault of its own.
    with pytest.raises(EpochClosed):
        dist.all_reduce(value)
    assert len(member.faults) == 1
    assert member.comms.drain()
    return all_together(member, 1)


def all_together(member: Member, epoch: int) -> bool:
    member.attach(epoch)
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item() == member.size


def replacement(member: Member) -> bool:
    member.init("nccl")
    return all_together(member, 1)


def test_an_error_that_torch_notices_before_the_abort_is_reported_once() -> None:
    with Ranks(2, kind=KIND) as ranks:
        ranks.start(peer_dies)
        for rank in range(2):
            ranks.hear(rank, "ready")
        ranks.kill(1)
        ranks.start(replacement, ranks=[1])
        assert all(ranks.results().values())
