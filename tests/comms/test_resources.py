"""Unlimited rebuilds: descriptors, threads and memory stay bounded and come back."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.comms import EpochClosed
from fake_nccl import KIND

from .ranks import Member, Ranks, run, usage
from .test_interrupt import MEGABYTE, check, load

TIMEOUT_SECONDS = 2.0


def settle(member: Member, abandoned: bool) -> dict[str, int]:
    """Usage when old epochs are freed; waits that were left end with the gloo timeout."""
    if abandoned:
        time.sleep(TIMEOUT_SECONDS)
    until = time.monotonic() + 4 * TIMEOUT_SECONDS
    while member.comms.reaping and time.monotonic() < until:
        time.sleep(0.02)
    time.sleep(0.2)
    return usage()


def many_swaps(member: Member, count: int, interrupts: bool) -> tuple[Any, Any]:
    member.init()
    for start in range(member.size - 1):
        dist.new_group([start, start + 1])
    first: Any = None
    for epoch in range(count):
        member.attach(epoch)
        value = torch.ones(MEGABYTE)
        dist.all_reduce(value)
        assert value[0].item() == member.size
        if interrupts:
            threading.Timer(0.02, member.comms.interrupt, [epoch]).start()
            with pytest.raises(EpochClosed):
                load(member, "messages")
            assert member.comms.drain()
        if epoch == 4:
            first = settle(member, interrupts)
    return first, settle(member, interrupts)


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [False, pytest.param(True, marks=pytest.mark.full)])
def test_fifty_swaps(interrupts):
    results = run(3, many_swaps, 50, interrupts, operation_timeout_seconds=TIMEOUT_SECONDS)
    for first, last in results.values():
        assert last["fds"] <= first["fds"] + 1, results
        assert last["threads"] <= first["threads"] + 2, results
        assert last["kib"] <= first["kib"] + (120_000 if interrupts else 30_000), results


def without_store(member: Member) -> bool:
    member.init()
    group = dist.new_group([0, 1])
    member.attach(0)
    member.send(("ready", None))
    member.order("go").wait()
    check(member, group)
    dist.barrier()
    return not member.faults


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gloo", KIND])
def test_nothing_touches_the_store_after_attach(kind):
    with Ranks(2, kind=kind) as ranks:
        assert all(ranks.go_without_store(without_store).values())
