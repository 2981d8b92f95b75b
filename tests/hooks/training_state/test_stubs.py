"""An optimizer without parameters has no state but its loss scaler, and that one counts."""

from __future__ import annotations

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import ChainedOptimizer, Float16OptimizerWithFloat16Params

from deadpool_megatron.hooks.training_state import extras, hashing
from tests.hooks.training_state.plain_loop import captured, plain_loop, scaler


class Loop:
    """Experts are trained, and everything else is frozen: Megatron's own optimizers of that."""

    def __init__(self) -> None:
        weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
        self.made = plain_loop([torch.nn.Module()])
        config = OptimizerConfig(fp16=True, lr=0.1)
        self.stub, experts = (
            Float16OptimizerWithFloat16Params(adam, config, scaler(hysteresis=1), None)
            for adam in (None, torch.optim.AdamW([weight]))
        )
        self.made.optimizer = ChainedOptimizer([self.stub, experts])

    def overflow(self) -> None:
        for one in self.made.optimizer.chained_optimizers:
            one.grad_scaler.update(True)

    @property
    def scale(self) -> float:
        return float(self.made.optimizer.get_loss_scale())


@pytest.mark.parametrize("by", ["survivor", "spare"])
def test_the_loss_is_scaled_as_before(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain the first one's scale is that of the loss, be it a stub or not."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    loop = Loop()
    assert loop.stub.is_stub_optimizer
    loop.overflow()
    kept = captured(loop.made)
    digests = hashing.state_digests(loop.made)
    loop.overflow()
    assert (loop.scale, hashing.state_digests(loop.made) == digests) == (2.0**14, False)
    found = loop if by == "survivor" else Loop()
    extras.restore(found.made, kept)
    assert found.scale == 2.0**15
    assert hashing.state_digests(found.made) == digests
