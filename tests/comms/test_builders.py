"""Groups connect side by side, as many at once as a process likes; late, or split from others."""

import threading
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.comms.in_flight.waiters import Builders, BuildJob
from tests.common.wait import wait_for

from .ranks import Member, Ranks, run

_ROLES = 4
_DEADLINE_SECONDS = 20.0
_GROUPS = st.lists(
    st.lists(st.integers(0, _ROLES - 1), min_size=2, max_size=_ROLES, unique=True).map(sorted),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(_GROUPS, st.lists(st.integers(1, 3), min_size=_ROLES, max_size=_ROLES))
def test_no_circle_of_waits(groups, at_once):
    """Each role connects its groups in the common order; a group is up when all have come."""
    gates = [threading.Barrier(len(group)) for group in groups]
    times = [0] * len(groups)

    def connect(number: int) -> None:
        if gates[number].wait(_DEADLINE_SECONDS) == 0:
            times[number] += 1

    def play(role: int) -> None:
        jobs = [
            BuildJob(str(number), partial(connect, number))
            for number, group in enumerate(groups)
            if role in group
        ]
        builders = Builders(jobs, at_once[role])
        builders.run()
        ended.append(builders.oldest)

    ended: list[str] = []
    roles = [threading.Thread(target=play, args=(role,), daemon=True) for role in range(_ROLES)]
    for role in roles:
        role.start()
    for role in roles:
        role.join(2 * _DEADLINE_SECONDS)
    assert ended == [""] * _ROLES, "a role waits for ever"
    assert times == [1] * len(groups), "every group comes up once"


def test_an_error_begins_no_further_group_and_leaves_none_hanging_unnoticed():
    hangs, fails = threading.Event(), threading.Event()
    begun = []

    def hang() -> None:
        fails.set()
        assert hangs.wait(_DEADLINE_SECONDS)

    def fail() -> None:
        assert fails.wait(_DEADLINE_SECONDS)
        raise RuntimeError("the peer is gone")

    third = BuildJob("third", lambda: begun.append("third"))
    builders = Builders([BuildJob("first", hang), BuildJob("second", fail), third], 2)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        builders.run()
    assert builders.oldest == "first"
    assert not builders.finished
    hangs.set()
    for thread in threading.enumerate():
        if thread.name == "deadpool-builder":
            thread.join(_DEADLINE_SECONDS)
    assert builders.finished
    assert not begun


LIMIT_SECONDS = 20.0


def makes_a_group_late(member: Member) -> float:
    member.init(epoch=0)
    member.send(("ready", None))
    if member.rank == 0:
        with pytest.raises(EpochClosed):
            dist.new_group([0, 1], group_desc="LATE")
    else:  # interrupted before it comes to this call
        assert member.order("interrupted").wait(LIMIT_SECONDS)
    assert len(c10d._world.pg_map) == 1
    assert member.comms.drain()
    member.client = None  # its lock is held by the call that was left
    member.attach(1, deadline_seconds=5.0)
    # The iteration is played again.
    group = dist.new_group([0, 1], group_desc="LATE")
    member.attach(2, deadline_seconds=5.0)
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def test_a_group_whose_making_is_interrupted_is_none():
    """Else the next epoch waits in vain for a rank that had not begun to make it."""
    with Ranks(2) as ranks:
        ranks.start(makes_a_group_late).until_all()
        wait_for("rank 0", lambda: "new_group" in (ranks.ask(0, "ask", "waiting_for") or ()))
        ranks.interrupt(0)
        ranks.send(1, "order", "interrupted")
        assert ranks.results() == {0: 2.0, 1: 2.0}


CPU = torch.device("cpu", 0)
PARTS = [[0, 2], [3, 1]]


def split() -> list[Any]:
    """Groups by split_group and by DeviceMesh."""
    parts = dist.split_group(split_ranks=PARTS, group_desc="PART")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return [parts, mesh.get_group("dp"), mesh.get_group("tp")]


def splits(member: Member) -> Any:
    member.init()
    # As where a program has given ``device_id`` and there is an accelerator: the CPU plays it.
    accelerator: Any = torch.accelerator
    accelerator.is_available, accelerator.current_accelerator = lambda: True, lambda: CPU
    dist.group.WORLD.bound_device_id = CPU
    assert dist.group.WORLD.get_backend(CPU).supports_splitting
    # How torch names what it splits.
    named = [c10d._hash_ranks_to_str(sorted(part)) for part in PARTS if member.rank in part]
    groups = split()
    assert groups[0].group_name == named[0]
    for epoch in range(2):
        member.attach(epoch)
        found = [seen(group) for group in groups]
    late = split()
    # By ranks of the parent, and not all of them.
    last = dist.split_group(late[0], split_ranks=[[1]])
    assert (last and last.ranks) == (late[0].ranks[1:] if late[0].rank() else None)
    return found, [seen(group) for group in late]


def seen(group: Any) -> tuple[Any, ...]:
    value = torch.tensor([3.0 ** dist.get_rank()])
    dist.all_reduce(value, group=group)
    assert c10d._resolve_process_group(group.group_name) is group
    return group.description, dist.get_process_group_ranks(group), group.rank(), value.item()


def test_groups_that_are_split_from_another_are_those_that_torch_makes():
    for rank, both in run(4, splits).items():
        for found in both:
            assert found == [
                ("PART", ranks := [rank % 2, rank % 2 + 2], rank // 2, sum(3.0**r for r in ranks)),
                ("mesh_dp", ranks, rank // 2, sum(3.0**r for r in ranks)),
                ("mesh_tp", ranks := [rank & 2, rank | 1], rank % 2, sum(3.0**r for r in ranks)),
            ]
