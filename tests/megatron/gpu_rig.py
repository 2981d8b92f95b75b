"""The parts of a loop and of its optimizers that are captured, for state that only GPUs have."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from deadpool_megatron.megatron import fp8, loop_extras as extras
from deadpool_megatron.megatron.optimizer import ShardState, complete_state, parameters_of
from deadpool_megatron.state.extras import decode, encode
from tests.gpu.digests import state_digests
from tests.state.loading import load


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **_: None)
    torch.manual_seed(3)


class Slot:
    """A generation: bytes of all parts, and extras."""

    def __init__(self, loop: Any, shard: ShardState) -> None:
        self.parts = []
        for part in shard.parts:
            self.parts.append(memoryview(bytearray(part.nbytes)))
            for view, tensor in zip(part.views(self.parts[-1]), part.tensors, strict=True):
                view.copy_(tensor)
        self.extras = encode(extras.capture(loop))

    def restore(self, loop: Any, shard: ShardState) -> None:
        """In the order of a recovery."""
        fp8.reset_in_flight(loop.model_chunks)
        for part, buffer in zip(shard.parts, self.parts, strict=True):
            load(part, buffer)
        values = decode(self.extras)
        extras.restore(loop, values)
        extras.restore_last(values)


def plain_inner(optimizer: torch.optim.Optimizer, **more: Any) -> Any:
    return SimpleNamespace(
        optimizer=optimizer, config=SimpleNamespace(), ddp_config=None, grad_scaler=None, **more
    )


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    return [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]


def distributed_inner(adam: Any, **config: Any) -> Any:
    """Megatron's own class, without what its constructor needs a GPU for."""
    inner = DistributedOptimizer.__new__(DistributedOptimizer)
    inner.optimizer = adam
    inner.config = SimpleNamespace(**config)
    inner.grad_scaler = None
    inner.is_stub_optimizer = False
    inner.ddp_config = SimpleNamespace(
        fp8_param_gather=True, num_distributed_optimizer_instances=1, use_megatron_fsdp=False
    )
    # Megatron's: one argument too few for the optimizer that it is meant for.
    inner.init_state_fn = lambda opt, config: opt.initialize_state(opt.param_groups[0]["params"][0])
    return inner


def update(inner: Any, numbers: Iterable[int], shard: ShardState | None = None) -> None:
    """Make updates whose gradients follow from their numbers."""
    for number in numbers:
        for index, parameter in enumerate(parameters_of(inner)):
            generator = torch.Generator().manual_seed(10 * number + index)
            gradient = torch.randn(parameter.shape, generator=generator)
            # Zeros of either sign, as sparse rows have.
            gradient[..., 0] = -0.0 if number % 2 else 0.0
            parameter.grad = gradient.to(parameter.dtype)
            vars(parameter)["decoupled_grad"] = gradient
        inner.optimizer.step()
        if shard is not None:
            shard.after_update(0)


def begun_and_continued(make: Callable[[], Any]) -> tuple[Any, Any, ShardState]:
    """Return a stock loop, and another that was completed, captured and restored on the way, after
    four equal updates."""
    stock, loop = make(), make()
    (stock_inner,), (inner,) = (each.optimizer.chained_optimizers for each in (stock, loop))
    update(stock_inner, range(4))
    generator = torch.get_rng_state()
    complete_state(loop.optimizer)
    assert torch.equal(torch.get_rng_state(), generator), "random numbers were drawn"
    shard = ShardState(loop.optimizer)
    first = Slot(loop, shard)
    update(inner, range(2), shard)
    kept = Slot(loop, shard)
    update(inner, range(2, 4), shard)
    assert differences(state_digests(stock), state_digests(loop)) == []
    for slot, begin in ((kept, 2), (first, 0)):
        slot.restore(loop, shard)
        update(inner, range(begin, 4), shard)
        assert differences(state_digests(stock), state_digests(loop)) == []
    return stock, loop, shard
