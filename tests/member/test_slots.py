"""Slots made before there is a role, page-locked, and seen as tensors without a loop over them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.member.protection import SlotViews
from deadpool_megatron.platform.devices import CpuPlatform, PinnedSlots, host_range
from deadpool_megatron.settings import Settings
from deadpool_megatron.state import parts
from deadpool_megatron.state.parts import Part
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


class Slot:
    """Of a segment, as a writer shows it."""

    def __init__(self, nbytes: int) -> None:
        self._memory = memoryview(bytearray(nbytes))

    def part(self, name: str) -> memoryview:
        return self._memory[:]


def test_tensors_over_a_slot_are_made_once(monkeypatch):
    part = Part("shard0", [torch.arange(4.0) + k for k in range(3)], (0,))
    slots = [Slot(part.nbytes) for _ in range(2)]
    made: list[int] = []
    view = parts.view_of
    monkeypatch.setattr(parts, "view_of", lambda *given: made.append(1) or view(*given))
    views = SlotViews()
    for iteration in range(10):
        slot = slots[iteration % 2]
        part.tensors[0].fill_(iteration)
        found = views.of(part, slot)  # type: ignore[arg-type]
        torch._foreach_copy_(found, part.tensors)
        assert slot.part("shard0")[:4].cast("f")[0] == iteration
    assert len(made) == 6


def test_a_part_without_bytes_has_its_tensors():
    """A role whose shard of a small distributed optimizer is empty: no tensors, or empty ones."""
    views = SlotViews()
    for tensors in ([], [torch.empty(0, 3)]):
        part = Part("shard1", tensors, (0,))
        found = views.of(part, Slot(part.nbytes))  # type: ignore[arg-type]
        assert [view.shape for view in found] == [tensor.shape for tensor in tensors]
