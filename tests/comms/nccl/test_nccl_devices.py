"""Helper threads use the device of their member; a spare has NCCL load its kernels."""

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BarrierOptions
from torch.distributed import distributed_c10d as c10d

from deadpool_megatron.comms import communicators, nccl as fabric
from deadpool_megatron.comms.in_flight.epoch import Progress
from deadpool_megatron.comms.inner import GroupSpec
from deadpool_megatron.comms.nccl import Blocks, NcclGroup
from deadpool_megatron.platform.devices import CpuPlatform
from fake_nccl import KIND, fake as fake_nccl
from fake_nccl.fake import FakeCommunicator, FakeNcclFabric
from tests.comms.ranks import Member, run

THIRD = torch.device("cuda", 2)
EPOCH: Any = SimpleNamespace(
    closed=False, check=lambda operation: None, progress=Progress(), waits={}
)


def with_options(device: torch.device) -> BarrierOptions:
    opts = BarrierOptions()
    opts.asyncOp = False
    opts.device = device
    return opts


@pytest.mark.parametrize(
    ("args", "kwargs", "device"),
    [
        ((), {}, THIRD),
        ((BarrierOptions(),), {}, THIRD),
        ((), {"timeout": timedelta(seconds=3)}, THIRD),
        # c10d gives the kind of device, and no number.
        ((), {"opts": with_options(torch.device("cuda"))}, THIRD),
        ((with_options(torch.device("cuda", 1)),), {}, torch.device("cuda", 1)),
    ],
)
def test_a_barrier_is_on_the_device_of_its_group(args, kwargs, device):
    called: list[BarrierOptions] = []
    plain = SimpleNamespace(barrier=called.append)
    backend = SimpleNamespace(uid=0)
    spec = GroupSpec("WORLD", "0", (0, 1), 0, THIRD)
    NcclGroup(spec, EPOCH, plain, backend, Blocks(lambda: False)).forward("barrier", args, kwargs)
    [opts] = called
    assert (opts.device, opts.asyncOp) == (device, True)
    if "timeout" in kwargs:
        assert opts.timeout == kwargs["timeout"]


class Platform(CpuPlatform):
    """Notes the threads that have entered."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []

    def thread_entry(self) -> Callable[[], None]:
        return lambda: self.entered.append(threading.current_thread().name)


def barriers_in_threads_that_entered(member: Member) -> list[str]:
    """As an attach begins its barrier, its thread has entered."""
    platform, found = Platform(), list[str]()
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(communicators, "select_platform", lambda: platform)
    forward = NcclGroup.forward

    def noted(self: NcclGroup, operation: str, *args: Any) -> Any:
        found.extend(platform.entered if operation == "barrier" else [])
        return forward(self, operation, *args)

    monkeypatch.setattr(NcclGroup, "forward", noted)
    member.init("nccl", epoch=0)
    return found


@pytest.mark.slow
def test_the_thread_of_an_attach_has_the_device_of_its_member():
    assert run(1, barriers_in_threads_that_entered, kind=KIND)[0] == ["deadpool-waiter"]


def timeouts(member: Member) -> list[float | None]:
    """Return the timeouts of WORLD on NCCL, of a group with its own, and of others."""
    c10d.default_pg_nccl_timeout = timedelta(minutes=10)
    member.init("nccl")
    own = dist.new_group([0], timeout=timedelta(minutes=3))
    found = [dist.group.WORLD, dist.new_group([0]), own, dist.new_group([0], backend="gloo")]
    specs = [group.spec().requested_timeout for group in found]
    return [None if spec is None else spec.total_seconds() for spec in specs]


def test_groups_have_the_timeout_of_the_requested_backend():
    assert run(1, timeouts, kind=KIND)[0] == [600.0, 600.0, 180.0, 1800.0]


def calls_of_a_warm_up(member: Member) -> tuple[list[str], bool, bool]:
    """The operations; whether their only communicator has one rank, and whether it was aborted."""
    member.init("nccl")
    made, calls = list[FakeCommunicator](), list[str]()
    start = FakeCommunicator._start

    def noted(self: FakeCommunicator, name: str, *args: Any) -> Any:
        calls.append(name)
        return start(self, name, *args)

    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(FakeCommunicator, "_start", noted)
    monkeypatch.setattr(fake_nccl, "set_up", made.append)
    fabric.warm(torch.device("cpu"), FakeNcclFabric)
    [communicator] = made
    return calls, communicator._spec.size == 1, communicator.aborted


@pytest.mark.slow
def test_each_collective_of_training_is_used_once_on_a_communicator_of_one_rank():
    calls, is_alone, was_aborted = run(1, calls_of_a_warm_up, kind=KIND)[0]
    kinds = {"allreduce", "broadcast", "_allgather_base", "_reduce_scatter_base", "alltoall_base"}
    assert set(calls) == kinds | {"barrier"}
    assert calls[-1] == "barrier", "the host waits until the device is through"
    assert is_alone
    assert was_aborted, "nothing of it is left when a role comes"
