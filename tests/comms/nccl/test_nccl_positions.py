"""How far devices have come: torch's dump is read, and a role that does not come is seen."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.comms.in_flight.device_time import read_positions
from deadpool_megatron.comms.in_flight.epoch import Progress
from deadpool_megatron.comms.inner import GroupSpec, Position
from deadpool_megatron.comms.nccl import NcclFabric
from fake_nccl import KIND
from tests.common.waiting import wait_for
from tests.comms.ranks import DEADLINE_SECONDS, Member, Ranks


def recorded(**status: Any) -> bytes:
    """As torch 2.13 writes it: groups by name, but their numbers by the uids of their objects."""
    config = {
        "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"},
        "3": {"name": "3", "desc": "TENSOR", "ranks": "[0, 1]"},
        "a3f": {"name": "a3f", "desc": "DATA", "ranks": "[0, 1]"},
    }
    numbers = ("last_enqueued_collective", "last_started_collective", "last_completed_collective")
    values = {
        uid: dict(zip(numbers, map(str, found), strict=True)) for uid, found in status.items()
    }
    return json.dumps({"version": "2.10", "pg_config": config, "pg_status": values}).encode()


def test_numbers_are_those_of_the_object_whatever_its_name() -> None:
    dump = recorded(**{"0": (-1, -1, -1), "3": (90, 90, 90), "11": (5, 5, 4)})
    assert read_positions(dump, {0, 11, 12}) == {0: (0, None, 0), 11: (5, 5, 4)}
    assert read_positions(recorded(**{"0": (1, 1, 1)}), {3}) == {}


class Recorded(NcclFabric):
    """The fabric of an epoch, with a recorder that has the numbers of all epochs."""

    def __init__(self, uids: dict[str, int], dump: bytes) -> None:
        super().__init__(EPOCH)
        self._uids, self._dump = uids, dump

    def _build(self, spec: GroupSpec, store: Any) -> tuple[Any, Any]:
        backend = SimpleNamespace(
            uid=self._uids[spec.name], eager_connect_single_device=lambda device: None
        )
        return SimpleNamespace(), backend

    def _recorded(self) -> bytes:
        return self._dump


EPOCH: Any = SimpleNamespace(
    closed=False, waits={}, check=lambda operation: None, progress=Progress()
)


def test_the_same_names_are_other_objects_in_the_next_epoch() -> None:
    """Of three groups, with numbers in between that belong to groups of other ranks."""
    names = ("0", "3", "7")
    dump = recorded(
        **{"0": (90, -1, 90), "1": (91, -1, 91), "2": (92, -1, 92)},
        **{"3": (5, -1, 4), "4": (6, -1, 6), "5": (7, -1, 7)},
    )
    for first_uid, ended in ((0, [90, 91, 92]), (3, [4, 6, 7])):
        uids = {name: first_uid + index for index, name in enumerate(names)}
        fabric = Recorded(uids, dump)
        for name in names:
            where = torch.device("cpu")
            fabric.create(GroupSpec(f"group {name}", name, (0, 1), 0, where), dist.HashStore())
        found = fabric.positions()
        assert [found[f"group {name}(0,1)"].completed for name in names] == ended


def test_a_collective_after_more_messages_is_pending() -> None:
    assert Position(enqueued=1, started=9, completed=9, collective=False).is_pending
    assert not Position(enqueued=9, started=9, completed=9, collective=False).is_pending


def one_does_not_come(member: Member) -> Any:
    member.init("nccl", epoch=0)
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
    assert [one.started for one in found.values()] == [None], "torch keeps no events of starts"
    answer = [(name, one.enqueued, one.completed, one.collective) for name, one in found.items()]
    member.say(("answered", None))
    member.order("come").wait(DEADLINE_SECONDS)  # not before the other one has looked, too
    if member.rank == 1:
        dist.all_reduce(torch.ones(1))
    if work is not None:
        work.wait()
    dist.barrier()
    return answer


@pytest.mark.slow
def test_the_fake_tells_what_its_device_does() -> None:
    with Ranks(2, kind=KIND) as ranks:
        ranks.start(one_does_not_come)
        for heard, order in (("looked", "go"), ("answered", "come")):
            ranks.until_all(heard)
            ranks.order_all(order)
        waiting, absent = ranks.results().values()
    [(name, enqueued, completed, collective)] = waiting
    assert name.endswith("(0,1)")
    assert (enqueued, collective) == (completed + 1, True)
    assert absent == [(name, completed, completed, True)]
