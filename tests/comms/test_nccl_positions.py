"""How far devices have come: torch's dump is read, and a role that does not come is seen."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.comms.nccl.positions import read_positions
from tests.common.waiting import wait_for

from .ranks import DEADLINE_SECONDS, Member, Ranks


def recorded(**status: Any) -> bytes:
    """As torch 2.13 writes it; group 3 is that of an epoch which is over."""
    config = {
        "0": {"name": "world", "desc": "default_pg", "ranks": "[0, 1]"},
        "3": {"name": "tp", "desc": "TENSOR", "ranks": "[0, 1]"},
        "11": {"name": "tp", "desc": "TENSOR", "ranks": "[0, 1]"},
    }
    numbers = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    values = {number: dict(zip(numbers, found, strict=True)) for number, found in status.items()}
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": values}).encode()


def test_the_newest_group_of_a_name_counts() -> None:
    dump = recorded(**{"0": (-1, -1, -1), "3": (90, 90, 90), "11": (5, 5, 4)})
    assert read_positions(dump, {"world", "tp", "other"}) == {"world": (0, 0, 0), "tp": (5, 5, 4)}
    assert read_positions(recorded(**{"0": (1, 1, 1)}), {"tp"}) == {}


@pytest.mark.parametrize("dump", [b"", b"[]", b'{"pg_config": {"0": 1}}', b'{"pg_config": 1}'])
def test_another_form_is_no_answer(dump: bytes) -> None:
    with pytest.raises(ValueError, match=r"recorder|Expecting"):
        read_positions(dump, {"tp"})


def one_does_not_come(member: Member) -> Any:
    member.init("nccl")
    member.attach(0)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    work = None
    if member.rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)

        def is_pending() -> bool:
            found = member.comms.positions()
            return found is not None and any(one.is_pending for one in found.values())

        wait_for("the operation to be pending", is_pending)
    member.say(("looked", None))
    member.order("go").wait(DEADLINE_SECONDS)
    found = member.comms.positions()
    assert found is not None
    answer = [(name, one.enqueued, one.completed, one.collective) for name, one in found.items()]
    if member.rank == 1:
        dist.all_reduce(torch.ones(1))
    if work is not None:
        work.wait()
    dist.barrier()
    return answer


@pytest.mark.slow
def test_the_fake_tells_what_its_device_does() -> None:
    with Ranks(2, kind="fake-nccl") as ranks:
        ranks.start(one_does_not_come)
        for rank in range(2):
            ranks.hear(rank, "looked")
        for rank in range(2):
            ranks.say(rank, "order", "go")
        waiting, absent = ranks.results().values()
    [(name, enqueued, completed, collective)] = waiting
    assert name.endswith("(0,1)")
    assert (enqueued, collective) == (completed + 1, True)
    assert absent == [(name, completed, completed, True)]
