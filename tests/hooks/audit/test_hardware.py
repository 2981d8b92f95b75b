"""What a role computes on is one number."""

from __future__ import annotations

import pytest
import torch

from deadpool_megatron.hooks.audit.hardware import hardware

CPU = torch.device("cpu")


def test_it_is_the_same_each_time() -> None:
    assert hardware(CPU) == hardware(CPU)
    assert 0 < hardware(CPU) < 1 << 56


def test_another_one_for_other_kernels_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hardware(CPU)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NONE")
    other = hardware(CPU)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert len({before, other, hardware(CPU)}) == 3
