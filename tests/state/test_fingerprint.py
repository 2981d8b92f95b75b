"""The fingerprint of parameters: by which words, and with how much memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from deadpool_megatron.state import fingerprint as module
from deadpool_megatron.state.fingerprint import fingerprint


class Largest(TorchFunctionMode):
    """Notes how many words of eight bytes a tensor had at most."""

    words = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Any = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.int64:
            self.words = max(self.words, found.numel())
        return found


def at_once(tensors: list[torch.Tensor]) -> list[int]:
    """The same sums in integers of any size."""
    plain = weighted = 0
    for index, tensor in enumerate(tensors):
        integer = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        for place, word in enumerate(tensor.contiguous().reshape(-1).view(integer).tolist()):
            plain += word
            weighted += word * (place % 8191 + index + 1)
    return [(total + (1 << 63)) % (1 << 64) - (1 << 63) for total in (plain, weighted)]


def test_blocks_change_nothing_but_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(7)
    tensors = [
        torch.randn(40_000, generator=generator),
        torch.randn(120, 130, generator=generator, dtype=torch.bfloat16).T,
        torch.empty(0),
    ]
    wanted = at_once(tensors)
    assert fingerprint(tensors, torch.device("cpu")).tolist() == wanted
    monkeypatch.setattr(module, "_BLOCK_WORDS", 1000)
    with Largest() as largest:
        assert fingerprint(tensors, torch.device("cpu")).tolist() == wanted
    assert largest.words == 1000
