"""A device that an interrupted step has left in error."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from deadpool_megatron.hooks.process.entry import EpochEntry
from deadpool_megatron.platform.base import CopyFailedError, Platform
from deadpool_megatron.platform.cpu import CpuPlatform
from fake_nccl import KIND
from fake_nccl.fake import NAN_CHECK
from tests.comms.ranks import DEADLINE_SECONDS, Member, run

pytestmark = pytest.mark.slow


class Quiet(EpochEntry):
    """With everything around the device taken away."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._protection = None


def device_asserts(member: Member) -> bool:
    """A kernel that looks for what is no number has asserted, as on junk of an abort: this process
    has lost its device."""
    os.environ[NAN_CHECK] = "1"
    member.init("nccl")
    member.attach(0)
    platform = CpuPlatform()
    assert Quiet(platform).quiesce(1.0)
    value, copied = torch.tensor([torch.nan]), torch.zeros(1)
    waits = member.comms.stream_waits
    assert waits.begin()
    waits.end()
    dist.all_reduce(value)
    member.comms.interrupt(0)
    with pytest.raises(RuntimeError, match="device-side"):
        value.item()
    with pytest.raises(RuntimeError, match="device-side"):
        waits.read()
    with pytest.raises(CopyFailedError, match="device-side"):
        platform.catch_up(1.0)
    with pytest.raises(CopyFailedError, match="device-side"):
        platform.side_copy([copied], [value]).wait(DEADLINE_SECONDS)
    assert member.comms.drain(), "the communicators are gone"
    return not Quiet(platform).quiesce(1.0)


def test_a_device_in_error_is_found_before_anything_is_restored() -> None:
    assert run(1, device_asserts, kind=KIND)[0]
