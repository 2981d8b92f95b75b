"""The effects of an abort of NCCL, simulated by the fake."""

import contextlib
import itertools
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from deadpool_megatron.cluster.link.rendezvous import MemberStore
from deadpool_megatron.comms import CommunicatorFault, EpochClosed, EpochStore, communicators
from deadpool_megatron.comms.in_flight.epoch import Progress
from deadpool_megatron.comms.in_flight.waiters import MAX_BUILDERS
from deadpool_megatron.comms.nccl import NcclFabric
from deadpool_megatron.member.hang_probe import HangProbe
from deadpool_megatron.settings import Settings
from deadpool_megatron.support import environment as nccl_environment
from fake_nccl import KIND, fake as fake_nccl
from tests.common.wait import wait_for
from tests.comms.ranks import DEADLINE_SECONDS, Member, Ranks, backend, run

pytestmark = pytest.mark.slow


class SetUp:
    """Holds the set-up of communicators until the test releases it, and notes them."""

    def __init__(self, groups: int) -> None:
        self.groups = groups
        self.begun = threading.Event()
        self.release = threading.Event()
        self.communicators: list[fake_nccl.FakeCommunicator] = []
        fake_nccl.set_up = self

    def __call__(self, communicator: fake_nccl.FakeCommunicator) -> None:
        self._begin(communicator)
        assert self.release.wait(DEADLINE_SECONDS)

    def _begin(self, communicator: fake_nccl.FakeCommunicator) -> None:
        self.communicators.append(communicator)
        if len(self.communicators) == self.groups:
            self.begun.set()


def attach(member: Member, epoch: int) -> None:
    """Attach a run's only role, through a store in this process."""
    store = MemberStore(lambda message: None)
    limit = DEADLINE_SECONDS
    member.comms.attach(epoch, EpochStore(store, epoch, limit), member.rank, limit)


def attach_and_close(member: Member, epoch: int, hanging: SetUp) -> None:
    """The epoch is closed while its first communicators are set up."""

    def close() -> None:
        hanging.begun.wait(DEADLINE_SECONDS)
        member.comms.interrupt(epoch)

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(EpochClosed):
        attach(member, epoch)
    closer.join(DEADLINE_SECONDS)


def late_set_ups(member: Member) -> bool:
    """Several groups are set up side by side as the epoch is closed: one rebuild, as any other."""
    member.init("nccl")
    for _ in range(9):
        dist.new_group([0])
    hanging = SetUp(MAX_BUILDERS)
    attach_and_close(member, 1, hanging)
    assert member.comms.drain(), "once may be bad luck"
    late = list(hanging.communicators)
    assert len(late) == MAX_BUILDERS, "of ten"
    assert not any(communicator.aborted for communicator in late)
    hanging.release.set()
    wait_for("the late aborts", lambda: all(communicator.aborted for communicator in late))
    wait_for("the end of their threads", lambda: not builders())
    assert hanging.communicators == late, "no further one was begun"
    # The process is as good as new.
    fake_nccl.set_up = lambda communicator: None
    attach(member, 2)
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item() == 1.0


def builders() -> list[str]:
    """Threads that make communicators, or wait for those that do."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name in ("deadpool-waiter", "deadpool-builder")]


def test_communicators_that_come_up_after_the_close_are_aborted():
    assert run(1, late_set_ups, kind=KIND)[0]


PENDING = 300


class Clock:
    """Time that passes only where a drain sleeps; ``due_seconds``: when aborts end on a device."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.due_seconds = math.inf
        self.is_due = threading.Event()

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
        if self.seconds >= self.due_seconds:
            self.is_due.set()
            time.sleep(seconds)  # an abort that ends now needs real time

    def abort_lasts(self, seconds: float) -> None:
        self.due_seconds = self.seconds + seconds
        assert self.is_due.wait(DEADLINE_SECONDS)


def abort_of_a_deep_queue(member: Member) -> float | None:
    """How long the drain took; None: the process has to be replaced."""
    member.init("nccl", epoch=0)
    if member.rank == 1:
        member.order("go").wait(DEADLINE_SECONDS)
        return None
    for _ in range(PENDING):
        dist.all_reduce(torch.ones(1))  # no peer takes part
    clock, epoch = Clock(), member.epoch
    assert epoch is not None
    (fabric,) = epoch.fabrics.values()
    communicators.time = clock  # type: ignore[attr-defined]
    fake_nccl.abort_lasts = clock.abort_lasts
    threading.Thread(target=member.comms.interrupt, args=(0,), daemon=True).start()
    wait_for("the abort", lambda: clock.due_seconds < math.inf)
    clean = member.comms.drain()
    assert fabric.aborting() is not clean
    clock.is_due.set()
    member.send(("drained", None))
    return clock.seconds if clean else None


@pytest.mark.parametrize("nccl", [True, False])
def test_a_deep_queue_costs_a_survivor_with_the_limits_of_cpus_only(nccl):
    """3.5 s of aborts: 0.45 of the time that there is for a close with NCCL, a fifth without."""
    close_seconds = Settings(communicator="nccl").close_seconds
    limit = 0.45 * close_seconds if nccl else Settings().drain_seconds
    with Ranks(2, kind=KIND, drain_seconds=limit) as ranks:
        ranks.start(abort_of_a_deep_queue)
        ranks.receive(0, "drained")
        ranks.send(1, "order", "go")
        took = ranks.results()[0]
    aborts_seconds = fake_nccl.ABORT_SECONDS + PENDING * fake_nccl.ABORT_SECONDS_PER_OPERATION
    if nccl:
        assert took is not None
        assert aborts_seconds <= took < limit, "the drain waits for the aborts"
    else:
        assert took is None


def fabric_of(*backends: Any) -> NcclFabric:
    """Return the fabric of a closed epoch whose drain lasts 10 ms."""
    limits = SimpleNamespace(drain_seconds=0.01)
    epoch: Any = SimpleNamespace(
        closed=True, limits=limits, progress=Progress(), waits={}, in_first_step=False
    )
    fabric = NcclFabric(epoch)
    fabric._backends = list(backends)
    return fabric


def test_an_interrupt_waits_for_stuck_aborts_once_not_for_each_of_them():
    released = threading.Event()
    stuck = SimpleNamespace(abort=lambda: released.wait(DEADLINE_SECONDS / 2))
    fabric = fabric_of(stuck, stuck, stuck, stuck)
    fabric.abort()
    assert fabric.aborting(), "the limit of a drain is over, and they are not"
    released.set()
    wait_for("the end of the aborts", lambda: not fabric.aborting())


def has_noticed() -> bool:
    """Return whether the watchdog has found a failed operation."""
    return bool(backend(dist.group.WORLD).get_error() is not ErrorType.SUCCESS)


def sees_its_peer_die(member: Member) -> Any:
    """The Work of rank 0, whose watchdog sees a dead peer before anybody has closed the epoch."""
    member.init("nccl", epoch=0)
    dist.barrier()
    member.send(("ready", None))
    if member.rank == 1:
        member.order("never").wait(DEADLINE_SECONDS)
    work = dist.all_reduce(torch.ones(1), async_op=True)
    wait_for("the watchdog", has_noticed)
    return work


def peer_dies(member: Member) -> bool:
    work = sees_its_peer_die(member)
    assert work.wait(), "nobody who waits is told"
    assert not member.faults
    [position] = (member.comms.positions() or {}).values()
    assert position.enqueued != position.completed, "what the watchdog has let go of has not ended"

    def close() -> None:
        wait_for("the report of the fault", lambda: member.faults)
        member.comms.interrupt(0)

    closer = threading.Thread(target=close)
    closer.start()
    standstill = HangProbe(itertools.count().__next__)
    for _ in range(4):
        standstill.evidence(member.comms)
    ((_, operation, text),) = member.faults
    assert (operation, "COMM_ERROR" in text) == ("watchdog", True)
    closer.join(DEADLINE_SECONDS)
    # Nor can the next operation be enqueued, and it is no fault of its own.
    with pytest.raises(EpochClosed):
        dist.all_reduce(torch.ones(1))
    assert len(member.faults) == 1
    assert member.comms.drain()
    return member.computes_in(1)


STANDS_SECONDS = 1.0


def enqueues_after_an_error(member: Member, *, as_members_do: bool) -> bool:
    """Whether a thread may enqueue; False: it stands still until the epoch is closed."""
    os.environ.pop(fake_nccl.DUMP_MILLISECONDS, None)
    if as_members_do:
        nccl_environment.complete(os.environ)
    sees_its_peer_die(member)
    enqueued = threading.Event()

    def enqueue() -> None:
        with contextlib.suppress(EpochClosed, CommunicatorFault):
            dist.all_reduce(torch.ones(1), async_op=True)
        enqueued.set()

    threading.Thread(target=enqueue).start()
    went_on = enqueued.wait(DEADLINE_SECONDS / 2 if as_members_do else STANDS_SECONDS)
    member.comms.interrupt(0)
    assert enqueued.wait(DEADLINE_SECONDS / 2), "the abort lets it go"
    return went_on


@pytest.mark.parametrize("as_members_do", [True, False])
def test_a_watchdog_that_sleeps_over_an_error_holds_no_member(as_members_do):
    with Ranks(2, kind=KIND) as ranks:
        ranks.start(partial(enqueues_after_an_error, as_members_do=as_members_do)).until_all()
        ranks.kill(1)
        assert ranks.results()[0] == as_members_do


def replacement(member: Member) -> bool:
    member.init("nccl")
    return member.computes_in(1)


def test_an_error_that_torch_notices_before_the_abort_is_reported_once():
    with Ranks(2, kind=KIND) as ranks:
        ranks.start(peer_dies).until_all()
        ranks.kill(1)
        ranks.start(replacement, ranks=[1])
        assert all(ranks.results().values())


def send(peer: int) -> None:
    dist.isend(torch.ones(2), peer)


def send_in_a_batch(peer: int) -> None:
    dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(2), peer)])


def reduce(_: int) -> None:
    dist.all_reduce(torch.ones(1))


def fails(member: Member, operation: Callable[[int], None], is_asked: bool) -> bool:
    """The peer dies, and the next thing that this rank enqueues is refused by NCCL, which is not
    asked how deep the thread is: a torch with NCCL inside of it cannot ask. The watchdog may be, or
    know of nothing yet."""
    fake_nccl.FakeNcclFabric._is_group_open = lambda _: False  # type: ignore[method-assign]
    fake_nccl.allow_unbatched = operation is send
    os.environ[fake_nccl.DUMP_MILLISECONDS] = "0"
    sees_its_peer_die(member)
    if not is_asked:
        backend: Any = fake_nccl.FakeCommunicator
        backend.get_error = lambda _: ErrorType.SUCCESS
    with pytest.raises(CommunicatorFault):
        operation(1)
    member.comms.interrupt(0)
    return member.comms.drain()


@pytest.mark.parametrize(
    ("operation", "is_asked", "may_go_on"),
    [
        (send, False, False),
        (send, True, True),
        (send_in_a_batch, False, False),
        (send_in_a_batch, True, True),
        (reduce, False, True),
    ],
)
def test_a_failure_in_a_group_costs_its_process(operation, is_asked, may_go_on):
    """NCCL would collect and never launch what that thread calls from then on."""
    with Ranks(2, kind=KIND, close_wait_seconds=0.1) as ranks:
        ranks.start(partial(fails, operation=operation, is_asked=is_asked)).until_all()
        ranks.kill(1)
        assert ranks.results()[0] == may_go_on


def fails_to_abort(member: Member, text: str) -> str:
    member.init("nccl", epoch=0)
    fake_nccl.abort_fails = text
    member.comms.interrupt(0)
    assert member.comms.drain() is not bool(member.comms.unusable_reason)
    return member.comms.unusable_reason


@pytest.mark.parametrize(("text", "ruins"), [("unhandled", True), ("already aborted", False)])
def test_an_abort_that_fails_costs_its_process(text, ruins):
    [reason] = run(1, partial(fails_to_abort, text=text), kind=KIND).values()
    assert ("an abort of NCCL failed: unhandled" in reason) is ruins
