"""A rank dies or hangs under load: all others leave, and the next epoch computes."""

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import _coalescing_manager

from deadpool_megatron.comms import CommunicatorFault, EpochClosed
from deadpool_megatron.comms.inner import OperationCounts
from tests.common.wait import wait_for

from .ranks import Member, Ranks, run

MEGABYTE = 1 << 18  # float32 elements
OUT_SECONDS = 1.0
LOADS = ["all_reduce", "messages", "reduce_scatter", "barrier", "all_gather"]


def groups(member: Member) -> tuple[Any, Any]:
    """Two ways to split the ranks into pairs, as tensor and data parallel groups."""
    rows = [dist.new_group([r, r + 1]) for r in range(0, member.size, 2)]
    half = member.size // 2
    columns = [dist.new_group([r, r + half]) for r in range(half)]
    return rows[member.rank // 2], columns[member.rank % half]


def check(member: Member, *groups: Any) -> bool:
    """All groups compute what they should."""
    value = torch.full((5,), float(member.rank))
    dist.all_reduce(value)
    assert value[0].item() == sum(range(member.size))
    for group in groups:
        value = torch.full((5,), float(member.rank))
        dist.all_reduce(value, group=group)
        assert value[0].item() == sum(dist.get_process_group_ranks(group))
    value = torch.zeros(4)
    ops = [
        dist.P2POp(
            dist.isend, torch.full((4,), float(member.rank)), (member.rank + 1) % member.size
        ),
        dist.P2POp(dist.irecv, value, (member.rank - 1) % member.size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert value[0].item() == (member.rank - 1) % member.size
    return True


def load(member: Member, kind: str, row: Any = None) -> None:
    """Communicate for ever."""
    size, rank = member.size, member.rank
    big = torch.zeros(8 * MEGABYTE)
    other = torch.zeros(8 * MEGABYTE)
    part = torch.zeros(8 * MEGABYTE // size)
    while True:
        if kind == "all_reduce":
            dist.all_reduce(big)
            dist.all_reduce(part, group=row)
        elif kind == "messages":
            works = [dist.isend(big, (rank + 1) % size), dist.irecv(other, (rank - 1) % size)]
            for work in works:
                work.wait()
        elif kind == "reduce_scatter":
            dist.reduce_scatter_tensor(part, big)
        elif kind == "all_gather":
            dist.all_gather_into_tensor(big, part, async_op=True).wait()
        else:
            dist.barrier()


def survive(member: Member, kind: str) -> dict[str, float]:
    member.init()
    row, column = groups(member)
    member.attach(0)
    member.send(("ready", None))
    try:
        load(member, kind, row)
    except EpochClosed:
        out = time.monotonic() - member.interrupted_at
    with pytest.raises(EpochClosed):
        dist.all_reduce(torch.zeros(1))
    drained = member.comms.drain()
    with pytest.raises(EpochClosed):
        dist.barrier()
    begin = time.monotonic()
    member.attach(1)
    attach = time.monotonic() - begin
    check(member, row, column)
    return {"out": out, "drained": drained, "attach": attach}


def replace(member: Member) -> dict[str, float]:
    member.init()
    row, column = groups(member)
    dist.all_reduce(torch.zeros(3), group=row)  # detached: warm
    member.attach(1)
    check(member, row, column)
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LOADS)
def test_killed_rank_is_replaced(kind):
    size, victim = 4, 2
    with Ranks(size) as ranks:
        ranks.start(survive, kind).until_all()
        for rank in range(size):
            wait_for("the load", lambda rank=rank: ranks.ask(rank, "ask", "progress") > 5)
        ranks.kill(victim)
        ranks.until_held_up(*ranks.pids)
        ranks.interrupt(0)
        ranks.start(replace, ranks=[victim])
        results = ranks.results()
    for rank in set(range(size)) - {victim}:
        assert results[rank]["out"] < OUT_SECONDS, results
        assert results[rank]["drained"], results


def faulted(member: Member) -> str:
    member.init(epoch=0)
    member.send(("ready", None))
    if member.rank == 1:
        time.sleep(30)
    with pytest.raises(CommunicatorFault) as caught:
        dist.all_reduce(torch.zeros(MEGABYTE))
    assert caught.value.operation == "allreduce"
    assert len(member.faults) == 1
    assert member.faults[0][:2] == ("default_pg", "allreduce")
    with pytest.raises(CommunicatorFault):
        dist.barrier()
    assert len(member.faults) == 1
    return str(caught.value)


def test_fault_without_interrupt_is_reported_once_and_named():
    with Ranks(2, close_wait_seconds=0.3) as ranks:
        ranks.start(faulted).until_all()
        ranks.kill(1)
        assert "default_pg" in ranks.results()[0]


def interrupted_attach(member: Member) -> bool:
    member.init()
    group = dist.new_group([0, 1])

    def report() -> None:
        wait_for("the attach", lambda: member.epoch is not None)
        member.send(("attaching", None))

    threading.Thread(target=report).start()
    with pytest.raises(EpochClosed) as caught:
        member.attach(0)  # rank 2 never comes
    assert caught.value.epoch == 0
    out = time.monotonic() - member.interrupted_at
    with pytest.raises(EpochClosed):
        dist.all_reduce(torch.zeros(1), group=group)
    # An epoch that was closed before it was attached is refused at once.
    begin = time.monotonic()
    with pytest.raises(EpochClosed):
        member.attach(0)
    assert time.monotonic() - begin < 0.2
    assert member.comms.drain()
    member.send(("out", out))
    return member.computes_in(1)


def late(member: Member) -> bool:
    member.init()
    dist.new_group([0, 1])
    return member.computes_in(1)


def test_interrupt_during_attach():
    with Ranks(3) as ranks:
        ranks.start(interrupted_attach, ranks=[0, 1])
        ranks.until_all("attaching")
        ranks.interrupt(0)
        for rank in range(2):
            assert ranks.receive(rank, "out") < 0.5
        ranks.start(late, ranks=[2])
        assert all(ranks.results().values())


def builds_for_long(member: Member) -> None:
    member.init(epoch=0)
    for allows_long_waits in (True, False):
        member.comms.allow_long_waits(allows_long_waits)
        if member.rank == 1:
            time.sleep(3)  # above the limit of 1 s, like a build or a save
        if allows_long_waits:
            dist.barrier()
    with pytest.raises(CommunicatorFault) as caught:
        dist.barrier()
    limit = "the limit is --deadpool-set operation-timeout-seconds"
    assert member.rank == 1 or limit in str(caught.value)


@pytest.mark.slow
def test_a_wait_that_is_long_on_purpose_has_its_own_limit():
    limits = {"operation_timeout_seconds": 1.0, "long_operation_seconds": 20.0}
    with Ranks(2, close_wait_seconds=0.5, **limits) as ranks:
        ranks.start(builds_for_long).results()


def late_peer(member: Member) -> str:
    member.init()
    dist.new_group([0, 1], group_desc="PAIR")
    if member.rank == 1:
        return ""
    begin = time.monotonic()
    with pytest.raises(CommunicatorFault) as caught:
        member.attach(0, deadline_seconds=0.5)
    assert time.monotonic() - begin < 2
    assert len(member.faults) == 1
    return str(caught.value)


def test_attach_names_the_missing_group():
    text = run(2, late_peer)[0]
    assert "default_pg" in text
    assert "0.5 s" in text


def dropped_blocks(member: Member) -> bool:
    member.init()
    world = dist.group.WORLD
    member.attach(0)
    member.comms.interrupt(0)
    with pytest.raises(EpochClosed), _coalescing_manager(world):  # noqa: PT012
        dist.all_reduce(torch.ones(1))
        dist.barrier()
    open_blocks = c10d._world.pg_coalesce_state
    assert world in open_blocks
    assert member.comms.drain()
    assert world not in open_blocks
    return member.computes_in(1)


def test_drain_drops_open_coalescing_blocks():
    assert all(run(2, dropped_blocks).values())


def dropped_send(member: Member) -> bool:
    member.init(epoch=0)
    for _ in range(3):
        if member.rank == 0:
            value = torch.full((MEGABYTE,), 5.0)
            dist.isend(value, 1)
            # Megatron's deallocate_output_tensor: the storage goes while the send flies.
            value.data = torch.empty(1)
            member.order("go").wait()
        else:
            member.send(("ready", None))
            member.order("go").wait()
            time.sleep(0.05)
            junk = [torch.full((MEGABYTE,), -1.0) for _ in range(4)]
            value = torch.zeros(MEGABYTE)
            dist.recv(value, 0)
            assert torch.all(value == 5.0)
            del junk
        assert len(member.epoch.in_flight) == (1 if member.rank == 0 else 0)
        member.comms.finish_iteration()
        assert len(member.epoch.in_flight) == 0
    return True


def test_dropped_sends_are_kept_alive_and_drained():
    with Ranks(2) as ranks:
        ranks.start(dropped_send)
        ranks.receive(1, "ready")
        ranks.order_all("go")
        for _ in range(2):
            ranks.receive(1, "ready")
        assert ranks.receive(0, "result")
        assert ranks.receive(1, "result")


def culprit(member: Member) -> bool:
    member.init()
    group = dist.new_group([0, 1], group_desc="TENSOR_PARALLEL")
    member.attach(0)
    dist.barrier()
    dist.all_reduce(torch.ones(1), group=group)
    if member.rank == 1:
        member.send(("ready", None))
        member.order("go").wait()
    dist.all_reduce(torch.ones(1), group=group)
    return True


def test_waiting_for_names_the_culprit():
    with Ranks(2) as ranks:
        ranks.start(culprit)
        ranks.receive(1, "ready")
        pair = "TENSOR_PARALLEL(0,1)"
        wait_for("rank 0", lambda: ranks.ask(0, "ask", "waiting_for") == (pair, "allreduce", 2))
        assert ranks.ask(1, "ask", "waiting_for") is None
        for rank, begun in ((0, 2), (1, 1)):
            assert ranks.ask(rank, "ask", "operation_counts")[pair] == OperationCounts(begun, 0)
        assert ranks.ask(1, "ask", "progress") == 3  # with the barrier of attach
        ranks.send(1, "order", "go")
        assert all(ranks.results().values())


def other_thread(member: Member) -> dict[str, Any]:
    """Interrupt a rank that waits for a living, idle peer."""
    member.init(epoch=3)
    member.comms.interrupt(2)  # an older epoch: no effect
    dist.barrier()
    member.send(("ready", None))
    if member.rank == 0:
        with pytest.raises(EpochClosed):
            dist.recv(torch.zeros(4), 1)
        return {"out": time.monotonic() - member.interrupted_at, "drained": member.comms.drain()}
    member.order("never").wait()
    return {}


def test_interrupt_wakes_a_receive_at_once():
    with Ranks(2) as ranks:
        ranks.start(other_thread).until_all()
        ranks.until_held_up(0)
        ranks.interrupt(3, [0])
        result = ranks.receive(0, "result")
        assert result["out"] < 0.3
        assert result["drained"]
