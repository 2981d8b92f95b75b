"""Abandoned waits, and waits of several threads."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.comms.in_flight import waiters
from deadpool_megatron.comms.in_flight.epoch import Epoch, Limits, Progress
from deadpool_megatron.comms.in_flight.waiters import Abandoned, Waiter, WaiterPool
from deadpool_megatron.comms.in_flight.works import HostWork

from .ranks import Member, run

LIMIT_SECONDS = 30.0


def of_epoch(*, closed: bool) -> Any:
    return SimpleNamespace(closed=closed, grace_over=0.01)


def test_the_error_of_a_call_that_was_left_is_not_that_of_a_later_call(monkeypatch):
    """The call ends between the decision to leave it and the note that it was left."""
    pool, left, ended = WaiterPool(), threading.Event(), threading.Event()
    notify = Waiter.notify

    def call() -> None:
        assert left.wait(LIMIT_SECONDS)
        raise RuntimeError("connection of the old epoch closed by peer")

    def notified(waiter: Waiter) -> None:
        notify(waiter)
        if waiter.finished:
            ended.set()

    class LateAbandoned(Abandoned):
        def __init__(self, waiter: Waiter, deadline: bool) -> None:
            super().__init__(waiter, deadline)
            left.set()
            assert ended.wait(LIMIT_SECONDS)

    monkeypatch.setattr(Waiter, "notify", notified)
    monkeypatch.setattr(waiters, "Abandoned", LateAbandoned)
    with pytest.raises(Abandoned):
        pool.call(call, of_epoch(closed=True))
    pool.call(lambda: None, of_epoch(closed=False))
    pool.shut_down()


def has_a_thread_that_receives(member: Member) -> bool:
    """Rank 0 sends the message in the next iteration."""
    member.init()
    side = dist.new_group([0, 1])
    member.attach(0)
    received = torch.zeros(1)
    thread = threading.Thread(target=lambda: dist.recv(received, 0, group=side))
    if member.rank == 1:
        thread.start()
        until = time.monotonic() + LIMIT_SECONDS
        while member.comms.waiting_for() is None:
            assert time.monotonic() < until
    member.comms.finish_iteration()
    dist.barrier()
    if member.rank == 0:
        dist.send(torch.ones(1), 1, group=side)
    else:
        thread.join(LIMIT_SECONDS)
        assert received.item() == 1.0
        assert len(member.epoch.in_flight) == 0
    return not member.faults


def test_iteration_ends_while_a_thread_waits_for_a_later_message():
    settings = {"operation_timeout_seconds": 3.0, "close_wait_seconds": 0.0}
    assert all(run(2, has_a_thread_that_receives, **settings).values())


class Running:
    """A Work that runs until the test ends it, whatever happens to its connections."""

    def __init__(self) -> None:
        self.waited, self.ended = threading.Event(), threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waited.set()
        if not self.ended.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


@pytest.mark.parametrize("in_thread", [False, True])
def test_memory_is_unsafe_while_another_thread_waits(in_thread):
    """Only that thread knows of an operation that its caller did not make asynchronous."""
    epoch = Epoch(1, Limits(60.0, 0.0, 5.0, LIMIT_SECONDS), WaiterPool(), Progress(), None)
    group: Any = SimpleNamespace(epoch=epoch, description="dp", place="dp", size=2)
    running = Running()
    work = HostWork(running, group, "reduce_scatter", 1, (), in_thread, False, True, None)

    def wait() -> None:
        with pytest.raises(EpochClosed):
            work.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    assert running.waited.wait(LIMIT_SECONDS)
    epoch.close()
    assert epoch.may_write()
    running.ended.set()
    thread.join(LIMIT_SECONDS)
    assert not epoch.may_write()
