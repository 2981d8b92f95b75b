"""The memory of arenas; more of parts is in calls/parts.txt."""

from typing import Any

import torch

from deadpool_megatron.state import parts
from deadpool_megatron.state.parts import move_into_arenas


def test_arenas_exist_twice_one_at_a_time(monkeypatch):
    """The state of a large shard does not fit into a device's memory a second time."""
    monkeypatch.setattr(parts, "ARENA_BYTES", 4096)
    tensors = [torch.full((256,), float(number)) for number in range(16)]  # 1024 bytes each
    large = torch.zeros(2048)
    before = [tensor.data_ptr() for tensor in tensors]
    unmoved: list[int] = []

    def zeros(*args: Any, **options: Any) -> torch.Tensor:
        pairs = zip(tensors, before, strict=True)
        unmoved.append(sum(tensor.data_ptr() == at for tensor, at in pairs))
        return torch.empty(*args, **options).zero_()

    monkeypatch.setattr(parts.torch, "zeros", zeros)
    moved = move_into_arenas([*tensors[:8], large, *tensors[8:]])
    assert unmoved == [16, 12, 8, 4]
    assert [arena.numel() for arena in moved] == [1024, 1024, 2048, 1024, 1024]
    assert moved[2] is large
    assert [t[0].item() for t in tensors] == list(range(16))


def test_optimizer_continues_exactly_in_arenas():
    def train(packed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(7, 3)), torch.nn.Parameter(torch.randn(5))]
        optimizer = torch.optim.AdamW(weights, lr=0.1)
        for step in range(4):
            if packed and step == 2:
                states = [t for w in weights for t in optimizer.state[w].values()]
                move_into_arenas([*weights, *states])
            optimizer.zero_grad()
            sum((w**2).sum() for w in weights).backward()
            optimizer.step()
        return [w.detach() for w in weights]

    assert all(torch.equal(a, b) for a, b in zip(train(False), train(True), strict=True))
