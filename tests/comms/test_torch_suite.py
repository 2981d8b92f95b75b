"""torch's own tests pass on our groups as on torch's own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from deadpool_megatron.comms import gloo

from .ranks import Member, Ranks, run

ROOT = Path(__file__).parents[2]
#: the number of listed tests that a newer torch may have renamed
MAX_MISSING = 5


@pytest.mark.full
def test_torchs_own_suite_passes_on_our_groups(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-m", "tests.comms.torch_suite"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-8000:]
    found, _, wanted, *_ = ran.stdout.split()
    assert int(found) > int(wanted) - MAX_MISSING, ran.stdout


def gradients(member: Member) -> bool:
    member.init()
    # Detached, a rank has nothing to compare itself with.
    model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), init_sync=False)
    (weight,) = model.parameters()
    for epoch in (1, 2):
        member.attach(epoch)
        model(torch.full((1, 2), member.rank + 1.0)).sum().backward()
        assert torch.equal(weight.grad, torch.full((1, 2), (member.size + 1) / 2)), epoch
        weight.grad = None
        member.comms.finish_iteration()
    return True


@pytest.mark.slow
def test_ddp_sends_through_the_communicator_of_the_moment():
    assert all(run(2, gradients).values())


def waits_for_a_future(member: Member) -> str:
    member.init(epoch=1)
    if member.rank == 0:
        # As where gloo forgets to wake an operation whose connection went.
        gloo.cut_connections = lambda epoll: None
        future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
        member.send(("waits", None))
        with pytest.raises(RuntimeError) as caught:
            future.wait()
        return str(caught.value)
    member.order("end").wait(60)
    return ""


def test_a_future_ends_with_its_epoch():
    with Ranks(2) as ranks:
        ranks.start(waits_for_a_future)
        ranks.receive(0, "waits")
        ranks.interrupt(1, ranks=[0])
        assert "epoch 1 was closed" in ranks.receive(0, "result")
        ranks.send(1, "order", "end")


def past_our_methods(member: Member) -> bool:
    member.init(epoch=1)
    tensor = torch.ones(1)
    c10d, add = torch.ops.c10d, torch.classes.c10d.ReduceOp()
    for group in (dist.group.WORLD, dist.new_group([0, 1], backend="nccl")):
        boxed = group.boxed()
        for call in (
            lambda: c10d.allreduce_([tensor], boxed, add, None),  # noqa: B023
            lambda: c10d.send([tensor], boxed, 1 - member.rank, 0),  # noqa: B023
            lambda: c10d.recv_([tensor], boxed, 1 - member.rank, 0),  # noqa: B023
            lambda: c10d.barrier(tensor, boxed, [], False),  # noqa: B023
        ):
            with pytest.raises(RuntimeError, match="No backend type associated with device"):
                call()
        dist.all_reduce(tensor, group=group)
        assert dist.get_backend(group) == group.name()
    assert tensor.item() == member.size**2
    return True


def test_no_operation_goes_past_our_methods():
    assert all(run(2, past_our_methods).values())
