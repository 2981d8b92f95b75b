"""Without peers a group behaves as if every peer held the same data."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from deadpool_megatron.comms import Communicators, ReconfigurableGroup
from fake_nccl import KIND

from .ranks import Member, backend, run


def tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def mixed_backends(member: Member) -> str:
    member.comms.install()
    with pytest.raises(ValueError, match="several in one") as refused:
        dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    return str(refused.value)


def test_mixed_backend_is_refused_with_advice():
    line = run(1, mixed_backends, kind=KIND)[0]
    assert line.startswith("backend 'cpu:gloo,cuda:nccl' is several in one")
    assert "ask for 'nccl'" in line
    assert "with backend 'gloo'" in line
    assert "\n" not in line


def everything_alone(member: Member) -> bool:
    before = (tasks(), descriptors())
    member.comms.install()
    dist.init_process_group("nccl", rank=1, world_size=4)
    assert dist.get_backend() == "nccl"
    row = dist.new_group([0, 1], group_desc="ROW")
    assert dist.new_group([2, 3]) is dist.GroupMember.NON_GROUP_MEMBER
    assert (tasks(), descriptors()) == before  # a fork would be safe here
    assert (dist.get_rank(), dist.get_world_size(), dist.get_rank(row)) == (1, 4, 1)

    x = torch.arange(4.0)
    dist.all_reduce(x)
    assert torch.equal(x, torch.arange(4.0))
    out = torch.zeros(16)
    dist.all_gather_single(out, x)
    assert torch.equal(out, x.repeat(4))
    part = torch.zeros(1)
    work = dist.reduce_scatter_single(part, x, async_op=True)
    assert work.wait()
    assert work.is_completed()
    assert part.item() == 1.0
    slots = [torch.zeros(4) for _ in range(4)]
    dist.all_gather(slots, x)
    assert all(torch.equal(slot, x) for slot in slots)
    dist.reduce_scatter(part, [torch.full((1,), float(i)) for i in range(4)])
    assert part.item() == 1.0
    out = torch.zeros(4)
    dist.all_to_all_single(out, x)
    assert torch.equal(out, torch.ones(4))
    uneven = torch.full((8,), -1.0)
    dist.all_to_all_single(uneven, torch.arange(7.0), [2, 2, 2, 2], [1, 2, 3, 1])
    assert torch.equal(uneven, torch.tensor([1.0, 2.0] * 4))
    dist.barrier()
    dist.send(x, 0)
    y = torch.full((2,), 7.0)
    dist.recv(y, 0)
    assert torch.equal(y, torch.zeros(2))
    with _coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
        dist.all_gather_single(torch.zeros(8), torch.ones(2))
    manager.wait()
    assert dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0)])[0].wait()
    objects: list[Any] = [None] * 4
    dist.all_gather_object(objects, "mine")
    assert objects == ["mine"] * 4
    objects = ["kept"]
    dist.broadcast_object_list(objects, src=0)
    assert objects == ["kept"]
    assert backend(row).supports_splitting
    assert (tasks(), descriptors()) == before
    dist.destroy_process_group()
    return True


def test_a_spare_can_do_everything_alone():
    assert run(1, everything_alone)[0]


def swaps(member: Member) -> bool:
    """Exchanging all inner groups in the middle changes no bit."""
    member.init()
    rank, size = member.rank, member.size
    row = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    groups = [dist.new_group([r, r + 2]) for r in range(2)]
    column = groups[rank % 2]

    def train(swap: bool) -> torch.Tensor:
        torch.manual_seed(rank)
        weight = torch.randn(32, 32)
        for step in range(12):
            if swap and step % 4 == 2:
                member.attach(10 + step)
            gradient = weight @ weight.t() / 32
            dist.all_reduce(gradient, group=row)
            shard = torch.empty(16, 32)
            dist.reduce_scatter_single(shard, gradient, group=column)
            weight = torch.tanh(gradient) * 0.9
            handle = dist.all_gather_single(weight, shard, group=column, async_op=True)
            other = torch.zeros(32)
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, shard[0].clone(), (rank + 1) % size),
                    dist.P2POp(dist.irecv, other, (rank - 1) % size),
                ]
            ):
                work.wait()
            handle.wait()
            weight = weight + other / 7
        return weight

    member.attach(1)
    plain = train(swap=False)
    swapped = train(swap=True)
    assert torch.equal(plain, swapped)
    dist.destroy_process_group()
    member.comms.uninstall()
    return True


@pytest.mark.slow
def test_swaps_change_no_bit():
    assert all(run(4, swaps).values())


def row_and_column() -> dict[str, Any]:
    """Make all groups of four roles in two rows; answers those of this role."""
    made: dict[str, Any] = {}
    for name, all_ranks in (("ROW", ([0, 1], [2, 3])), ("COLUMN", ([0, 2], [1, 3]))):
        for ranks in all_ranks:
            group = dist.new_group(ranks, group_desc=name)
            if isinstance(group, ReconfigurableGroup):
                made[name] = group
    return made


def adopts(member: Member) -> bool:
    """A spare that was built as role 0 becomes role 3 by renumbering the same objects."""
    role = member.rank
    built_as = 0 if role == 3 else role
    member.comms.install()
    dist.init_process_group("gloo", rank=built_as, world_size=4)
    groups = row_and_column()
    member.attach(5)
    assert dist.get_rank() == role
    assert dist.get_process_group_ranks(groups["ROW"]) == [role // 2 * 2, role // 2 * 2 + 1]
    assert dist.get_rank(groups["COLUMN"]) == role // 2
    for group in groups.values():
        value = torch.tensor([float(role)])
        dist.all_reduce(value, group=group)
        assert value.item() == sum(dist.get_process_group_ranks(group))
    peer = {0: 1, 1: 0, 2: 3, 3: 2}[role]
    value = torch.tensor([float(role)])
    if role % 2:
        dist.send(value, peer, group=groups["ROW"])
    else:
        dist.recv(value, peer, group=groups["ROW"])
        assert value.item() == peer
    return True


def test_a_spare_takes_another_role():
    assert all(run(4, adopts).values())


@pytest.fixture
def communicators():
    """Detached communicators in the process of the test."""
    found = Communicators()
    found.install()
    try:
        yield found
    finally:
        dist.destroy_process_group()
        found.uninstall()


def test_renumbering_refuses_another_shape(communicators):
    dist.init_process_group("gloo", rank=0, world_size=4)
    dist.new_group([0, 1, 2], group_desc="EMBEDDING")
    with pytest.raises(ValueError, match="other groups"):
        communicators.attach(1, dist.HashStore(), 3, 1.0)


def test_groups_are_found_again_by_the_calls_that_made_them(communicators):
    dist.init_process_group("gloo", rank=0, world_size=4)
    before = row_and_column()
    communicators.renumber(3)
    assert dist.get_rank() == 3
    with communicators.reusing_groups():
        again = row_and_column()
        with pytest.raises(RuntimeError, match="not created before"):
            dist.new_group([0, 3], group_desc="NEW")
    assert again["ROW"] is before["ROW"]
    assert again["COLUMN"] is before["COLUMN"]
    assert dist.get_process_group_ranks(again["ROW"]) == [2, 3]
    assert dist.get_process_group_ranks(again["COLUMN"]) == [1, 3]
    with communicators.reusing_groups(), pytest.raises(RuntimeError, match="COLUMN"):
        dist.new_group([0, 2], group_desc="COLUMN")
    # Outside of the block, groups are created.
    assert isinstance(dist.new_group([0, 3], group_desc="NEW"), ReconfigurableGroup)


@pytest.mark.usefixtures("communicators")
def test_detached_group_gives_zeros_for_data_of_peers():
    dist.init_process_group("gloo", rank=1, world_size=2)
    remote, own = torch.full((3,), 7.0), torch.full((3,), 7.0)
    dist.broadcast(remote, src=0)
    dist.broadcast(own, src=1)
    assert remote.tolist() == [0, 0, 0]
    assert own.tolist() == [7, 7, 7]


@pytest.mark.parametrize("role", [0, 3])
def test_a_group_that_was_renumbered_answers_by_its_new_rank(communicators, role):
    """A spare builds and warms up detached, and keeps the slices of the role that it takes."""
    dist.init_process_group("gloo", rank=0, world_size=4)
    communicators.renumber(role)
    part, slices = torch.full((1,), -1.0), [torch.full((1,), float(rank)) for rank in range(4)]
    dist.reduce_scatter(part, slices)
    assert part.item() == role
    own, remote = torch.ones(1), torch.ones(1)
    dist.broadcast(own, src=role)
    dist.broadcast(remote, src=1)
    assert (own.item(), remote.item()) == (1.0, 0.0)
