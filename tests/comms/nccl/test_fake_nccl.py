"""The seam under NCCL's semantics; and that the fake is strict enough to notice traps."""

import contextlib
import ctypes
import inspect
import json
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deadpool_megatron.comms import EpochClosed
from deadpool_megatron.platform.devices import CopyFailedError, CpuPlatform
from fake_nccl import KIND, fake as fake_nccl
from fake_nccl.stream_order import JUNK_LOG
from tests.comms.ranks import Member, Ranks, backend, run
from tests.comms.test_operations import everything

pytestmark = pytest.mark.slow


def same_as_gloo(member: Member) -> bool:
    from tests.comms.ranks import plain_gloo

    fake_nccl.allow_unbatched = True
    with plain_gloo(member):
        expected = collectives(member)
    member.init("nccl", epoch=0)
    assert dist.get_backend() == "nccl"
    got = collectives(member)
    for actual, wanted in zip(got, expected, strict=True):
        assert torch.equal(actual, wanted)
    return True


def collectives(member: Member) -> list[torch.Tensor]:
    torch.manual_seed(member.rank)
    size, rank = member.size, member.rank
    value = torch.randn(6)
    dist.all_reduce(value)
    doubled = value * 2
    out = torch.zeros(2 * size)
    work = dist.all_gather_single(out, value[:2], async_op=True)
    work.wait()
    part = torch.zeros(1)
    dist.reduce_scatter_single(part, doubled[:size].contiguous())
    other = torch.zeros(6)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, value, (rank + 1) % size),
            dist.P2POp(dist.irecv, other, (rank - 1) % size),
        ]
    ):
        work.wait()
    dist.barrier()
    return [value, doubled, out + 0, part + 0, other + 0]


def test_results_are_those_of_gloo():
    assert all(run(2, same_as_gloo, kind=KIND).values())


def traps(member: Member) -> bool:
    member.init("nccl", epoch=0)
    rank = member.rank
    # wait() does not block the host, and data is junk until the stream is joined.
    value = torch.ones(3)
    if rank == 1:
        time.sleep(0.4)
    begin = time.monotonic()
    work = dist.all_reduce(value, async_op=True)
    work.wait()
    assert time.monotonic() - begin < 0.2
    if rank == 0:
        assert memory_of(value) != 2.0  # junk still: nothing has synchronised the host
    assert value[0].item() == 2.0
    # Unbatched messages are refused, batched messages pass.
    with pytest.raises(AssertionError, match="unbatched"):
        dist.isend(value, 1 - rank)
    # A wait by another thread orders that thread only.
    work = dist.all_reduce(value, async_op=True)
    helper = threading.Thread(target=work.wait)
    helper.start()
    helper.join()
    with pytest.raises(fake_nccl.StreamOrderError):
        value.sum()
    work.wait()
    assert value.sum().item() == 12.0
    # Memory next to that of an operation is free.
    buffer = torch.zeros(8)
    work = dist.all_reduce(buffer[:4], async_op=True)
    buffer[4:].add_(1.0)
    work.wait()
    assert buffer.sum().item() == 4.0
    return True


def memory_of(tensor: torch.Tensor) -> float:
    """The first element as it lies there now, past torch."""
    return ctypes.c_float.from_address(tensor.data_ptr()).value


def test_the_fake_notices_traps():
    assert all(run(2, traps, kind=KIND).values())


def host_points(member: Member) -> bool:
    """Work that overlaps training waits as the host does."""
    member.init("nccl", epoch=0)
    # The side stream waits for what the submitting thread has waited for; the submitter does not.
    platform = CpuPlatform()
    value, copied = torch.ones(1), torch.zeros(1)
    late(member)
    begin = time.monotonic()
    dist.all_reduce(value)
    copy = platform.side_copy([copied], [value])
    assert time.monotonic() - begin < LATE_SECONDS / 2
    assert copy.wait(10.0)
    assert copied.item() == 2.0
    # A copy without a wait is a race, and found.
    work = dist.all_reduce(value, async_op=True)
    copy = platform.side_copy([copied], [value])
    with pytest.raises(CopyFailedError, match="without a wait"):
        copy.wait(10.0)
    work.wait()
    late(member)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    platform.synchronize(10.0)
    assert work.is_completed()
    return True


LATE_SECONDS = 0.1


def late(member: Member) -> None:
    """Rank 1 comes late to the next operation."""
    if member.rank == 1:
        time.sleep(LATE_SECONDS)


def test_platform_waits_as_the_host_does():
    assert all(run(2, host_points, kind=KIND).values())


def stock_batch(member: Member) -> bool:
    """torch's own batch_isend_irecv does not batch on a Python group: noticed (trap B1)."""
    stock = c10d.batch_isend_irecv
    member.init("nccl", epoch=0)
    value = torch.ones(2)
    peer = 1 - member.rank
    ops = [dist.P2POp(dist.isend, value, peer), dist.P2POp(dist.irecv, torch.zeros(2), peer)]
    if "isinstance(group, ProcessGroup)" not in inspect.getsource(stock):  # torch 2.13
        with pytest.raises(AssertionError, match="unbatched"):
            stock(ops)
    works = dist.batch_isend_irecv(ops)
    assert len(works) == 1
    works[0].wait()
    dist.barrier()
    return True


def test_batches_are_batches():
    assert all(run(2, stock_batch, kind=KIND).values())


def junk(member: Member) -> bool:
    """Trap A3: after an abort the host reads junk and nothing raises, up to the next call."""
    member.init("nccl", epoch=0)
    norm = torch.ones(1).clone()  # the first operation that is watched takes long
    dist.barrier()
    member.send(("ready", None))
    dist.all_reduce(norm)  # rank 1 is dead: it returns, the host continues
    begin = time.monotonic()
    read = norm.item()  # sits here until the abort
    assert time.monotonic() - begin > 0.1
    assert read not in (1.0, 2.0)
    assert 0.0 < read < 1.0
    assert norm.item() == read  # and stays
    with pytest.raises(EpochClosed):
        dist.all_reduce(norm)
    assert member.comms.drain()
    return member.computes_in(1)


def dies_then_replaced(member: Member, epoch: int) -> bool:
    member.init("nccl")
    if epoch == 0:
        member.attach(epoch)
        dist.barrier()
        member.send(("ready", None))
        time.sleep(60)
    return member.computes_in(epoch)


def test_junk_after_an_abort(tmp_path, monkeypatch):
    monkeypatch.setenv(JUNK_LOG, str(tmp_path / "junk"))
    with Ranks(2, kind=KIND) as ranks:
        ranks.start(junk, ranks=[0])
        ranks.start(dies_then_replaced, 0, ranks=[1]).until_all()
        ranks.kill(1)
        time.sleep(0.3)
        ranks.interrupt(0)
        ranks.start(dies_then_replaced, 1, ranks=[1])
        assert all(ranks.results().values())
    (entry,) = map(json.loads, (tmp_path / "junk").read_text().splitlines())
    assert entry["operation"] == "allreduce"
    assert "junk" in entry["readers"]


def whole_set(member: Member) -> bool:
    fake_nccl.allow_unbatched = True
    member.init("gloo")  # gloo groups stay gloo
    member.attach(0)
    everything(member.rank, member.size)
    group = dist.new_group(backend="gloo")
    assert isinstance(backend(group), dist.ProcessGroupGloo)
    return True


def test_gloo_groups_stay_gloo():
    assert all(run(2, whole_set, kind=KIND).values())


def waits_in_cpp(member: Member) -> float:
    """DistributedDataParallel waits for the future of an operation, in C++."""
    member.init("nccl", epoch=0)
    store, value = member.store(), torch.ones(3)
    if member.rank == 1:
        with contextlib.suppress(dist.DistStoreError):  # held until we are there
            store.wait(["gone on"], timedelta(seconds=1))
    work = dist.all_reduce(value, async_op=True)
    torch.futures.Future.wait(work.get_future())
    if member.rank == 0:
        store.set("gone on", b"")
    return value[0].item()


def test_future_orders_later_operations():
    assert run(2, waits_in_cpp, kind=KIND) == {0: 2.0, 1: 2.0}
