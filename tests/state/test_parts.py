"""Parts: what goes into a flat buffer comes back bit for bit; the fingerprint of tensors."""

from typing import Any

import pytest
import torch

from deadpool_megatron.state import parts
from deadpool_megatron.state.parts import Part, move_into_arenas


def test_a_buffer_too_small_is_refused():
    part = Part("shard0", [torch.zeros(100)], (0,))
    with pytest.raises(ValueError, match="buffer of 10 bytes"):
        part.views(memoryview(bytearray(10)))


def test_arenas_keep_the_objects_and_move_the_storage():
    owner, other = torch.arange(6.0).view(2, 3), torch.ones(4)
    half = torch.arange(5, dtype=torch.bfloat16)
    base = torch.arange(8.0)
    view, first = base[2:5], base[:2]
    moved = move_into_arenas([owner, other, view, half, first])
    assert len(moved) == 4
    assert moved[1] is half, "alone of its kind"
    assert moved[2] is view
    assert moved[3] is first
    owner.mul_(2)
    assert moved[0][:6].tolist() == [0, 2, 4, 6, 8, 10]
    assert moved[0][16:20].tolist() == [1, 1, 1, 1]
    view.add_(1)
    assert base[2].item() == 3


def test_no_more_than_one_arena_is_there_twice(monkeypatch):
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


def test_optimizer_goes_on_exactly_in_arenas():
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


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("shard0", [torch.zeros(2), torch.zeros(4)]),
        ("shard0", [torch.zeros(4, dtype=torch.int32), torch.zeros(2)]),
        ("shard0", [torch.zeros(2, 2), torch.zeros(2)]),
        ("shard1", [torch.zeros(4), torch.zeros(2)]),
    ],
    ids=["order", "dtype", "shape", "name"],
)
def test_signature_tells_layouts_apart(name, other):
    one = Part("shard0", [torch.zeros(4), torch.zeros(2)], (0,))
    same = Part("shard0", [torch.ones(4), torch.ones(2)], (1,))
    assert one.signature() == same.signature() != Part(name, other, (0,)).signature()


def test_a_tensor_just_behind_a_part_is_not_in_it():
    memory = torch.zeros(8)
    part = Part("shard0", [memory[:4]], (0,))
    assert part.offset_of(memory[2:4]) == 8
    for other in (memory[4:], memory[3:5]):
        with pytest.raises(KeyError):
            part.offset_of(other)
