"""Everything a caller can do gives what plain gloo gives, bit for bit."""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d as c10d
from torch.distributed.distributed_c10d import _coalescing_manager, _get_process_group_name

from deadpool_megatron import failpoints
from deadpool_megatron.comms import ReconfigurableGroup
from deadpool_megatron.comms.groups import detached
from deadpool_megatron.comms.inner import COMMUNICATION

from .ranks import Member, backend, kind, plain_gloo, run

LIMIT_SECONDS = 20.0


def everything(rank: int, size: int) -> list[Any]:
    """Call each operation over WORLD and two subgroups; return all results."""
    torch.manual_seed(rank)
    results: list[Any] = []
    world = dist.group.WORLD
    even = dist.new_group(list(range(0, size, 2)), group_desc="EVEN")
    pair = dist.new_group([0, 1], backend="gloo")
    data, zeros = torch.randn, torch.zeros

    def kept(result: Any) -> Any:
        """Add to the results what an operation is about to fill."""
        results.append(result)
        return result

    def each(*shape: int) -> list[torch.Tensor]:
        return [data(*shape) for _ in range(size)]

    dist.all_reduce(kept(data(7)))
    work = dist.all_reduce(kept(data(5)), op=dist.ReduceOp.MAX, async_op=True)
    assert work.wait()
    assert work.is_completed()
    dist.all_reduce(kept(data(3, 3)), async_op=True).get_future().wait()
    if rank % 2 == 0:
        dist.all_reduce(kept(data(4)), group=even)
        assert dist.get_rank(even) == rank // 2
        assert dist.get_process_group_ranks(even) == list(range(0, size, 2))
        assert even.group_desc == "EVEN"
    dist.broadcast(kept(data(6)), src=1)
    reduced = data(6)
    dist.reduce(reduced, dst=0)
    kept(reduced if rank == 0 else None)
    dist.all_gather(kept([zeros(3) for _ in range(size)]), data(3))
    dist.all_gather_into_tensor(kept(zeros(2 * size)), data(2))
    dist.reduce_scatter_tensor(kept(zeros(2)), data(2 * size))
    dist.reduce_scatter_tensor(kept(zeros(2)), data(2 * size), async_op=True).wait()
    dist.reduce_scatter(kept(zeros(2)), each(2))
    dist.all_to_all_single(kept(zeros(size * 2)), data(size * 2))
    sent = [1 + (rank + peer) % 2 for peer in range(size)]
    dist.all_to_all_single(kept(zeros(sum(sent))), data(sum(sent)), sent, sent)
    dist.all_to_all(kept([zeros(2) for _ in range(size)]), each(2))
    dist.gather(data(2), kept([zeros(2) for _ in range(size)] if rank == 0 else None), dst=0)
    dist.scatter(kept(zeros(2)), each(2) if rank == 1 else None, src=1)
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier()

    # Coalescing, all three fast paths.
    with _coalescing_manager(world):
        dist.all_reduce(kept(data(3)))
        dist.all_reduce(kept(data(4)))
    for operation, filled, given in (
        (dist.all_gather_into_tensor, size, 1),
        (dist.reduce_scatter_tensor, 1, size),
    ):
        with _coalescing_manager(world, async_ops=True) as manager:
            for count in (2, 3):
                operation(kept(zeros(count * filled)), data(count * given))
        manager.wait()

    # Messages.
    right, left = (rank + 1) % size, (rank - 1) % size
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, data(4), right), dist.P2POp(dist.irecv, kept(zeros(4)), left)]
    ):
        work.wait()
    received = kept(zeros(4))
    if rank == 0:
        dist.send(data(4), 1)
        dist.recv(received, 1, group=pair, tag=7)
    elif rank == 1:
        assert dist.recv(received) == 0
        dist.send(data(4), 0, group=pair, tag=7)

    # Objects.
    dist.all_gather_object(kept([None] * size), {"rank": rank})
    dist.broadcast_object_list(kept([("from", rank)] if rank == 0 else [None]), src=0)
    dist.gather_object(rank, kept([None] * size if rank == 0 else None), dst=0)
    dist.scatter_object_list(kept([None]), list(range(size)) if rank == 0 else None, src=0)

    # Functional collectives reach the group from C++.
    import torch.distributed._functional_collectives as functional

    kept(functional.all_reduce(data(3), "sum", world) + 0)
    kept(functional.all_gather_tensor(data(2), 0, world) + 0)
    kept(functional.reduce_scatter_tensor(data(2 * size), "sum", 0, world) + 0)
    assert dist.get_backend() == "gloo"
    assert dist.get_backend(pair if rank < 2 else None) == "gloo"
    assert dist.get_world_size() == size
    return results


def both(member: Member) -> bool:
    with plain_gloo(member):
        expected = everything(member.rank, member.size)
    member.init(epoch=0)
    got = everything(member.rank, member.size)
    assert len(got) == len(expected)
    for index, (actual, other) in enumerate(zip(got, expected, strict=True)):
        if isinstance(actual, torch.Tensor):
            assert torch.equal(actual, other), index
        elif isinstance(actual, list) and actual and isinstance(actual[0], torch.Tensor):
            assert all(torch.equal(a, b) for a, b in zip(actual, other, strict=True)), index
        else:
            assert actual == other, index
    assert len(member.epoch.in_flight) <= 1  # the future that was waited for directly
    member.comms.finish_iteration()
    assert len(member.epoch.in_flight) == 0
    assert member.comms.progress() > 30
    return True


@pytest.mark.slow
def test_forwards_equal_plain_gloo():
    assert all(run(3, both).values())


def test_communication_is_found_by_torchs_return_types():
    assert {"send", "recv", "barrier", *detached.ACTIONS} & set(dir(ProcessGroup)) <= {
        *COMMUNICATION
    }
    assert not {"size", "split_group", "_end_coalescing", "set_timeout"} & {*COMMUNICATION}
    assert {*COMMUNICATION} <= vars(ReconfigurableGroup).keys()


def uneven(member: Member) -> bool:
    member.init()
    rank, size = member.rank, member.size
    member.attach(1)
    sizes = [3, 0, 5][:size]
    slots = [torch.full((n,), -1.0) for n in sizes]
    dist.all_gather(slots, torch.full((sizes[rank],), float(rank), requires_grad=True))
    for peer, slot in enumerate(slots):
        assert torch.equal(slot, torch.full((sizes[peer],), float(peer)))
        assert not slot.requires_grad, "autograd knows nothing of gathers"
    inputs = [torch.full((n,), float(rank + 1)) for n in sizes]
    of_all = range(1, size + 1)
    for operation, wanted in {
        dist.ReduceOp.SUM: sum(of_all),
        dist.ReduceOp.MAX: max(of_all),
        dist.ReduceOp.MIN: min(of_all),
        dist.ReduceOp.PRODUCT: math.prod(of_all),
    }.items():
        output = torch.zeros(sizes[rank])
        work = dist.reduce_scatter(output, inputs, op=operation, async_op=True)
        work.wait()
        assert torch.equal(output, torch.full((sizes[rank],), float(wanted)))
    assert inputs[0][0] == rank + 1
    slots = [torch.full((n,), -1.0) for n in sizes]
    work = dist.all_gather(slots, torch.full((sizes[rank],), float(rank)), async_op=True)
    until = time.monotonic() + LIMIT_SECONDS
    while not work.is_completed():
        assert time.monotonic() < until
    for peer, slot in enumerate(slots):
        assert torch.equal(slot, torch.full((sizes[peer],), float(peer))), "asked, not waited for"
    assert work.wait()
    return True


def test_uneven_gather_and_reduce_scatter():
    assert all(run(3, uneven).values())


def kinds_of_gathers(member: Member) -> bool:
    member.init(epoch=1)
    size = member.size
    plain = dist.all_gather([torch.zeros(2) for _ in range(size)], torch.ones(2), async_op=True)
    kinds = []
    for sizes in ([2], [2, 3]):
        outputs = [torch.zeros(n * size) for n in sizes]
        with _coalescing_manager(dist.group.WORLD, async_ops=True) as manager:
            for n, output in zip(sizes, outputs, strict=True):
                dist.all_gather_into_tensor(output, torch.ones(n))
        manager.wait()
        assert all(bool((output == 1).all()) for output in outputs)
        (work,) = manager.works
        kinds += [kind(work) for work in getattr(work.inner, "_works", [work.inner])]
    assert kinds == [kind(plain)] * 3
    plain.wait()
    return True


def scatters_in_modes(member: Member) -> bool:
    """The outputs may be tensors that are written to in the mode of the caller only."""
    member.init(epoch=1)
    world = dist.group.WORLD
    with torch.inference_mode():
        output = torch.zeros(2)
        dist.reduce_scatter_tensor(output, torch.ones(4))
        several = [torch.zeros(2), torch.zeros(3)]
        with _coalescing_manager(world, async_ops=True) as manager:
            for tensor in several:
                dist.reduce_scatter_tensor(tensor, torch.ones(tensor.numel() * member.size))
        manager.wait()
    parameter = torch.nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        dist.reduce_scatter_tensor(parameter, torch.ones(4))
    assert not member.faults
    return all(bool((tensor == member.size).all()) for tensor in [output, *several, parameter])


def test_reduce_scatter_in_inference_mode_and_without_gradients():
    assert all(run(2, scatters_in_modes, close_wait_seconds=0.0).values())


def future_of_gathers(member: Member) -> bool:
    member.init(epoch=1)
    outputs = [[torch.zeros(2), torch.zeros(3)] for _ in range(member.size)]
    inputs = [torch.full((n,), float(member.rank)) for n in (2, 3)]
    future = dist.all_gather_coalesced(outputs, inputs, async_op=True)
    value = future.wait()
    for rank, pair in enumerate(outputs):
        assert all(bool((tensor == rank).all()) for tensor in pair)
    member.comms.finish_iteration()
    return sorted(tensor.numel() for tensor in value) == sorted([2, 3] * member.size)


def test_coalesced_gathers_have_a_future():
    assert all(run(2, future_of_gathers).values())


def test_coalesced_gathers_have_a_harmless_name():
    """See comms/gathers.py: torch's own operation corrupts memory."""
    assert all(run(2, kinds_of_gathers).values())


def errors_of_the_caller(member: Member) -> bool:
    member.init(epoch=1)
    with pytest.raises(RuntimeError, match="size"):
        dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(2))
    assert not member.faults
    t = torch.ones(1)
    dist.all_reduce(t)
    assert t.item() == member.size
    return True


def test_errors_of_the_caller_pass_through():
    assert all(run(2, errors_of_the_caller).values())


def time_limit(group: Any) -> Any:
    return backend(group).options._timeout


def timeouts(member: Member) -> bool:
    from datetime import timedelta

    member.init()
    world = dist.group.WORLD
    c10d._set_pg_timeout(timedelta(seconds=33), world)
    member.attach(1)
    assert time_limit(world) == timedelta(seconds=33)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=500))
    assert time_limit(group) == timedelta(seconds=20)
    assert isinstance(backend(group), dist.ProcessGroupGloo)
    member.attach(2)
    assert time_limit(world) == timedelta(seconds=33)
    assert world.group_name == _get_process_group_name(world)
    assert world._device_types == [torch.device("cpu")]
    return True


def test_timeouts_are_remembered_over_attach():
    assert all(run(2, timeouts).values())


def failpoint(member: Member, plan: Path) -> set[str]:
    failpoints.load(plan)
    member.init()
    group = dist.new_group([0, 1], group_desc="PAIR")
    member.attach(0)
    dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    return failpoints.fired(plan)


def test_failpoints_before_and_after_each_operation(tmp_path):
    plan = tmp_path / "plan.json"
    match = {"op": "allreduce", "group": "PAIR", "size": 2}
    plan.write_text(
        json.dumps(
            [
                {"id": "before", "point": "comm", "match": match, "action": "mark"},
                {"id": "after", "point": "comm.done", "match": match, "action": "mark"},
            ]
        )
    )
    results = run(2, failpoint, plan)
    assert set.union(*results.values()) == {"before", "after"}
