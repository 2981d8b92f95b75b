"""The ways in which the communicators of an epoch are made: one result with all of them."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor  # each rank of the fake imports it: once for all

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.comms.groups.roster import Entry, Roster
from fake_nccl import KIND
from tests.comms.ranks import Member, Ranks, backend
from tests.comms.test_store import agent, attach, line_to

__all__ = ["agent"]

pytestmark = pytest.mark.slow
#: as tensor, data and expert parallelism have them, a row of single ranks, and one across all rows
GROUPS = [
    *([0, 1], [2, 3]),
    *([0, 2], [1, 3]),
    *([rank] for rank in range(4)),
    [1, 2],
    [0, 1, 2, 3],
    *([2, 3], [0, 1]),
]


def make_groups() -> list[Any]:
    made = [dist.new_group(ranks, group_desc=f"GROUP {ranks}") for ranks in GROUPS]
    dist.new_group([0, 3], backend="gloo")
    return [group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER]


def sums(groups: list[Any]) -> list[list[int]]:
    """Of numbers whose sum depends on its order."""
    found: list[list[int]] = []
    for number, group in enumerate([*groups, dist.group.WORLD]):
        torch.manual_seed(100 * number + dist.get_rank())
        value = torch.randn(64)
        dist.all_reduce(value, group=group)
        found.append(value.view(torch.int32).tolist())
    return found


def plays(
    member: Member, path: str, own: list[list[int]], *epochs: int
) -> tuple[list[list[int]], int]:
    """Train in two epochs; in the first rank 1 dies, in the second it is another process. Return
    the sums of the last epoch, and how often its world was split. Only their ranks know the
    groups ``own``."""
    member.init("nccl")
    for ranks in own:
        if member.rank in ranks:
            dist.new_group(ranks, use_local_synchronization=True)
    store, groups, world = line_to(path), make_groups(), dist.group.WORLD
    for epoch in epochs:
        attach(member, store, epoch)
        found = sums(groups)
        splits = backend(world).splits
        if epoch != epochs[-1]:
            member.send(("ready", None))
            with pytest.raises(EpochClosed):
                [dist.barrier() for _ in itertools.count()]
            store.close(epoch)
            assert member.comms.drain()
    dist.barrier()
    return found, splits


def after_a_loss(agent: str, way: str, first: int) -> dict[int, tuple[list[list[int]], int]]:
    with Ranks(4, kind=KIND, rebuild=way) as ranks:
        ranks.start(plays, agent, [], first, first + 1).until_all()
        ranks.kill(1)
        ranks.interrupt(first)
        return ranks.start(plays, agent, [], first + 1, ranks=[1]).results()


def test_groups_of_a_round_of_splits_share_no_role():
    roster = Roster()
    for ranks in ([0, 1, 2, 3], *GROUPS):
        roster.add(Entry(tuple(ranks), "nccl", "", None))
    roster.add(Entry((0, 3), "gloo", "", None))
    assert [len(groups) for groups in roster.splits()[1]] == [2, 2, 4, 1, 1, 2]


@pytest.mark.parametrize("way", ["side-by-side", "split"])
def test_results_are_bit_identical_in_whatever_way_communicators_are_made(agent, way):
    wanted, found = after_a_loss(agent, "one-by-one", 1), after_a_loss(agent, way, 3)
    assert [found[rank][0] for rank in range(4)] == [wanted[rank][0] for rank in range(4)]
    # Pairs, pairs across, single ranks, [1, 2], all of them and pairs again: all take part in each.
    assert {splits for _, splits in found.values()} == {6 if way == "split" else 0}


def test_groups_that_only_some_ranks_know_are_not_split(agent):
    with Ranks(4, kind=KIND, rebuild="split") as ranks:
        found = ranks.start(plays, agent, [[0, 1]], 1).results()
    assert {splits for _, splits in found.values()} == {0}
