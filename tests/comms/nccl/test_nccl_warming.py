"""A spare has NCCL load what it loads once: by a group of its own, which is gone afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deadpool_megatron.comms import Communicators
from deadpool_megatron.comms.nccl import fabric
from fake_nccl import KIND
from fake_nccl import fake as fake_nccl
from fake_nccl.fake import FakeCommunicator, FakeNcclFabric
from tests.comms.ranks import Member, run


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
def test_each_collective_of_training_is_used_once_on_a_communicator_of_one_rank() -> None:
    calls, is_alone, was_aborted = run(1, calls_of_a_warm_up, kind=KIND)[0]
    kinds = {"allreduce", "broadcast", "_allgather_base", "_reduce_scatter_base", "alltoall_base"}
    assert set(calls) == kinds | {"barrier"}
    assert calls[-1] == "barrier", "the host waits until the device is through"
    assert is_alone
    assert was_aborted, "nothing of it is left when a role comes"


def test_only_nccl_is_warmed_up_and_what_it_refuses_ends_no_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[torch.device] = []

    def refuse(device: torch.device) -> None:
        asked.append(device)
        raise RuntimeError("unhandled system error")

    monkeypatch.setattr(fabric, "warm", refuse)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    Communicators("gloo").warm()
    Communicators(KIND).warm()
    assert not asked
    with pytest.warns(UserWarning, match="NCCL could not be warmed up: unhandled system error"):
        Communicators("nccl").warm()
    assert asked == [torch.device("cuda", 3)]
