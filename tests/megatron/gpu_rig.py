"""The parts of a loop and of its optimizers that are captured, for state that only GPUs have."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from deadpool_megatron.megatron import fp8, loop_extras as extras
from deadpool_megatron.megatron.optimizer import ShardState
from deadpool_megatron.state.extras import decode, encode
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
