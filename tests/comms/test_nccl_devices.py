"""Threads beside training use the device of their member, not the first one of the node."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import BarrierOptions

from deadpool_megatron.comms.in_flight.epoch import Progress
from deadpool_megatron.comms.inner import GroupSpec
from deadpool_megatron.comms.nccl.blocks import Blocks
from deadpool_megatron.comms.nccl.fabric import NcclGroup

THIRD = torch.device("cuda", 2)
EPOCH: Any = SimpleNamespace(closed=False, check=lambda operation: None, progress=Progress())


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
        # What c10d gives: the kind of device, and no number.
        ((), {"opts": with_options(torch.device("cuda"))}, THIRD),
        ((with_options(torch.device("cuda", 1)),), {}, torch.device("cuda", 1)),
    ],
)
def test_a_barrier_is_on_the_device_of_its_group(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> None:
    called: list[BarrierOptions] = []
    plain = SimpleNamespace(barrier=called.append)
    backend = SimpleNamespace(uid=0)
    spec = GroupSpec("WORLD", "0", (0, 1), 0, THIRD)
    NcclGroup(spec, EPOCH, plain, backend, Blocks()).forward("barrier", args, kwargs)
    [opts] = called
    assert (opts.device, opts.asyncOp) == (device, True)
    if "timeout" in kwargs:
        assert opts.timeout == kwargs["timeout"]
