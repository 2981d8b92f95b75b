"""Slots seen as tensors without a loop over them."""

from __future__ import annotations

import pytest
import torch

from deadpool_megatron.hooks.capture.protection import SlotViews
from deadpool_megatron.state import packing
from deadpool_megatron.state.packing import Part


class Slot:
    """Of a segment, as a writer shows it."""

    def __init__(self, nbytes: int) -> None:
        self._memory = memoryview(bytearray(nbytes))

    def part(self, name: str) -> memoryview:
        return self._memory[:]


def test_tensors_over_a_slot_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part("shard0", [torch.arange(4.0) + k for k in range(3)], (0,))
    slots = [Slot(part.nbytes) for _ in range(2)]
    made: list[int] = []
    view = packing._view
    monkeypatch.setattr(packing, "_view", lambda *given: made.append(1) or view(*given))
    views = SlotViews()
    for iteration in range(10):
        slot = slots[iteration % 2]
        part.tensors[0].fill_(iteration)
        found = views.of(part, slot)  # type: ignore[arg-type]
        torch._foreach_copy_(found, part.tensors)
        assert slot.part("shard0")[:4].cast("f")[0] == iteration
    assert len(made) == 6


def test_a_part_without_bytes_has_its_tensors() -> None:
    """A role whose shard of a small distributed optimizer is empty: no tensors, or empty ones."""
    views = SlotViews()
    for tensors in ([], [torch.empty(0, 3)]):
        part = Part("shard1", tensors, (0,))
        found = views.of(part, Slot(part.nbytes))  # type: ignore[arg-type]
        assert [view.shape for view in found] == [tensor.shape for tensor in tensors]
