"""Slots of a spare: made before there is a role, and page-locked."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.platform.devices import CpuPlatform, PinnedSlots, host_range
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.vault_client import VaultClient
from tests.member.session_rig import BareEntry
from tests.vault.harness import make_layout, segment_bytes

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
def test_copies_come_first(tmp_path, capsys, share, fits):
    limit = int(share * segment_bytes(LAYOUT))
    settings = replace(Settings(), memory_gb=limit / 1e9)
    client = VaultClient(
        "", tmp_path, Seat(0, 0, 0), connect_seconds=0.0, memory_bytes=settings.memory_bytes
    )
    device = Device()
    protection = SimpleNamespace(layout=LAYOUT, copied_parts=["shard"])
    built = SimpleNamespace(protection=protection)
    pinned = PinnedSlots(device, lambda text: None)
    link = SimpleNamespace(place=MemberPlace(0, 0, 0))
    BareEntry(_vault=client, settings=settings, _built=built, _pinned=pinned, _link=link)._park()
    assert ("--deadpool-memory-gb" in capsys.readouterr().out) == (not fits)
    assert bool(list(tmp_path.glob(".parked-*"))) == fits
    assert device.locked == [3 << 20] * (LAYOUT.slots if fits else 0), "before there is a role"
