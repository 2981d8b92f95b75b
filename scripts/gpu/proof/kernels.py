"""Part kernels: optimizers of a GPU's stack, put back from what was captured.

Training that continues from a slot in shared memory, into which its state was copied as in a run,
has to give the same bits as undisturbed training. A missing package is reported, and is no failure.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from proof.device import Device
from proof.result import Task
from proof.slots import slot_of

_WIDTH = 256
_STEPS = 4


def capture(task: Task) -> None:
    """Try each kind of optimizer."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    kinds: dict[str, Callable[[Any], Any]] = {"torch AdamW": torch.optim.AdamW}
    for name, module in (
        ("TransformerEngine FusedAdam", "transformer_engine.pytorch.optimizers"),
        ("apex FusedAdam", "apex.optimizers"),
    ):
        try:
            kinds[name] = importlib.import_module(module).FusedAdam
        except (ImportError, OSError, AttributeError) as error:
            task.facts[name] = f"not installed ({error})"
    for name, make in kinds.items():
        layer = torch.nn.Linear(_WIDTH, _WIDTH, device=task.device.value)
        same = _resumes_equal(task.device, layer, make(layer.parameters()), lambda x, m=layer: m(x))
        task.facts[name] = "same bits" if same else "other bits"
        task.expect(same, f"{name}: other bits after the state was put back")
        task.save()


def _resumes_equal(device: Device, layer: Any, optimizer: Any, run: Callable[[Any], Any]) -> bool:
    """Train, copy all state into a slot, train on; put the copy back, and train the same again."""
    import torch

    seeded = torch.Generator().manual_seed(5)
    inputs = torch.randn(2 * _STEPS, _WIDTH, _WIDTH, generator=seeded).to(device.value)

    def train(first: int) -> list[Any]:
        for value in inputs[first : first + _STEPS]:
            optimizer.zero_grad(set_to_none=True)
            run(value).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu().clone() for parameter in layer.parameters()]

    train(0)
    with slot_of(_state_tensors(layer, optimizer)) as (slot, _):
        groups = [dict(group) for group in optimizer.param_groups]  # FusedAdam counts steps there
        slot.capture()
        wanted = train(_STEPS)
        slot.put_back()
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        return all(map(torch.equal, train(_STEPS), wanted))


def _state_tensors(layer: Any, optimizer: Any) -> list[Any]:
    """Return weights, buffers and the optimizer's state."""
    import torch

    kept = [v for state in optimizer.state.values() for v in state.values()]
    kept = [value for value in kept if isinstance(value, torch.Tensor)]
    return [*layer.parameters(), *layer.buffers(), *kept]
