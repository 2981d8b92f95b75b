"""Slots that are made before there is a role leave the room for what is kept for others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deadpool_megatron.hooks.generations.memory import park
from deadpool_megatron.hooks.generations.pinning import PinnedSlots
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.platform.base import host_range
from deadpool_megatron.platform.cpu import CpuPlatform
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.errors import NoRoom
from deadpool_megatron.vault.member.client import VaultClient
from deadpool_megatron.vault.shm.geometry import segment_bytes
from tests.vault.harness import make_layout

LAYOUT = make_layout(0, nbytes=3 << 20)


class Device(CpuPlatform):
    """Knows what was page-locked."""

    is_cuda = True

    def __init__(self) -> None:
        super().__init__()
        self.locked: list[int] = []

    def register_host_memory(self, memory: torch.Tensor | memoryview) -> None:
        self.locked.append(host_range(memory)[1])


@pytest.mark.parametrize(("share", "fits"), [(1.5, False), (2.5, True)])
def test_copies_come_first(tmp_path: Path, share: float, fits: bool) -> None:
    limit = int(share * segment_bytes(LAYOUT))
    settings = replace(Settings(), memory_gb=limit / 1e9)
    client = VaultClient(
        "", tmp_path, Seat(0, 0, 0), connect_seconds=0.0, memory_bytes=settings.memory_bytes
    )
    device = Device()
    pinned = PinnedSlots(device, lambda text: None)
    if fits:
        park(client, LAYOUT, 1, settings, pinned, ["shard"], nodes=2)
    else:
        with pytest.raises(NoRoom, match="--deadpool-memory-gb"):
            park(client, LAYOUT, 1, settings, pinned, ["shard"], nodes=2)
    assert bool(list(tmp_path.glob(".parked-*"))) == fits
    assert device.locked == [3 << 20] * (LAYOUT.slots if fits else 0), "before there is a role"
