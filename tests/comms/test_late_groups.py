"""Groups that are made in the middle of training."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deadpool_megatron.comms import EpochClosed

from .ranks import Member, Ranks

LIMIT_SECONDS = 20.0


def makes_a_group_late(member: Member) -> float:
    member.init(epoch=0)
    member.say(("ready", None))
    if member.rank == 0:
        with pytest.raises(EpochClosed):
            dist.new_group([0, 1], group_desc="LATE")
    else:  # interrupted before it comes to this call
        assert member.order("interrupted").wait(LIMIT_SECONDS)
    assert len(c10d._world.pg_map) == 1
    assert member.comms.drain()
    member._client = None  # its lock is held by the call that was left
    member.attach(1, deadline_seconds=5.0)
    # The iteration is played again.
    group = dist.new_group([0, 1], group_desc="LATE")
    member.attach(2, deadline_seconds=5.0)
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def test_a_group_whose_making_is_interrupted_is_none() -> None:
    """Else the next epoch waits in vain for a rank that had not begun to make it."""
    with Ranks(2) as ranks:
        ranks.start(makes_a_group_late)
        for rank in range(2):
            ranks.hear(rank, "ready")
        until = time.monotonic() + LIMIT_SECONDS
        waiting = None
        while waiting is None or waiting[1] != "new_group":
            assert time.monotonic() < until
            ranks.say(0, "ask", "waiting_for")
            waiting = ranks.hear(0, "answer")
        ranks.interrupt(0)
        ranks.say(1, "order", "interrupted")
        assert ranks.results() == {0: 2.0, 1: 2.0}
