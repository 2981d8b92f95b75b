"""Coalesced all-gathers never reach gloo's workers under the name that corrupts memory."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from deadpool_megatron.comms.gathers import REPLACEMENTS, SeveralWorks
from tests.comms.ranks import kind
from tests.trainer.ranks import run_ranks

if torch.cuda.is_available():
    pytest.skip("the stand-ins are not installed on a machine with a GPU", allow_module_level=True)


def gathers() -> dict[str, Any]:
    """On stock gloo with the stand-ins: kinds of the operations, and what was gathered."""
    group: Any = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    one, two = torch.full((2,), float(rank)), torch.full((3,), 10.0 + rank)
    plain = group.allgather([[torch.zeros(2) for _ in range(size)]], [one])
    plain.wait()

    single = torch.zeros(2 * size)
    with _coalescing_manager(group, async_ops=True) as manager:
        dist.all_gather_into_tensor(single, one)
    manager.wait()
    kinds = [kind(work) for work in manager.works]

    several = [torch.zeros(2 * size), torch.zeros(3 * size)]
    with _coalescing_manager(group, async_ops=True) as manager:
        dist.all_gather_into_tensor(several[0], one)
        dist.all_gather_into_tensor(several[1], two)
    manager.wait()
    (work,) = manager.works
    assert isinstance(work, SeveralWorks)
    assert work.is_completed()
    kinds += [kind(inner) for inner in work._works]

    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    dist.all_gather_coalesced(lists, [one, two], group)
    return {
        "kinds": {found == kind(plain) for found in kinds},
        "single": single.tolist(),
        "several": [tensor.tolist() for tensor in several],
        "lists": [[tensor.tolist() for tensor in tensors] for tensors in lists],
    }


@pytest.mark.slow
def test_stock_gloo_gathers_tensor_by_tensor():
    assert (
        run_ranks(2, gathers)
        == [
            {
                "kinds": {True},
                "single": [0, 0, 1, 1],
                "several": [[0, 0, 1, 1], [10, 10, 10, 11, 11, 11]],
                "lists": [[[0, 0], [10, 10, 10]], [[1, 1], [11, 11, 11]]],
            }
        ]
        * 2
    )


def test_every_coalesced_gather_of_this_torch_is_known():
    names = {name for name in dir(dist.ProcessGroup) if "gather" in name and "coalesced" in name}
    assert names == set(REPLACEMENTS) & names
    assert names
