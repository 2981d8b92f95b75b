"""Part kernels: optimizers and layers of a GPU's stack, put back from what was captured.

Training that goes on from a copy of the state must give the same bits as training that went on by
itself. What is not installed is told, and is no failure.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from proof.device import Device, Size
from proof.result import Findings

_WIDTH = 256
_STEPS = 4


def capture(device: Device, _size: Size, _checkout: Path | None, _out: Path) -> Findings:
    """Each kind of optimizer, and TransformerEngine's linear layer with FP8."""
    import torch

    found = Findings()
    torch.use_deterministic_algorithms(True, warn_only=True)
    kinds: dict[str, Callable[[Any], Any]] = {"torch AdamW": torch.optim.AdamW}
    for name, module in (
        ("TransformerEngine FusedAdam", "transformer_engine.pytorch.optimizers"),
        ("apex FusedAdam", "apex.optimizers"),
    ):
        try:
            kinds[name] = importlib.import_module(module).FusedAdam
        except (ImportError, OSError, AttributeError) as error:
            found.facts[name] = f"not installed ({error})"
    for name, make in kinds.items():
        layer = torch.nn.Linear(_WIDTH, _WIDTH, device=device.value)
        same = _goes_on_equal(device, layer, make(layer.parameters()), lambda x, m=layer: m(x))
        found.facts[name] = "same bits" if same else "other bits"
        found.expect(same, f"{name}: other bits after the state was put back")
    _fp8(device, found)
    return found


def _fp8(device: Device, found: Findings) -> None:
    import torch

    name = "TransformerEngine FP8"
    try:
        te = importlib.import_module("transformer_engine.pytorch")
        recipe = importlib.import_module("transformer_engine.common.recipe").DelayedScaling()
    except (ImportError, OSError) as error:
        found.facts[name] = f"not installed ({error})"
        return
    layer = te.Linear(_WIDTH, _WIDTH, device=device.value)

    def run(value: Any) -> Any:
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            return layer(value)

    same = _goes_on_equal(device, layer, torch.optim.AdamW(layer.parameters()), run)
    found.facts[name] = "same bits" if same else "other bits"
    found.expect(same, f"{name}: other bits after scales and amax were put back")


def _goes_on_equal(device: Device, layer: Any, optimizer: Any, run: Callable[[Any], Any]) -> bool:
    """Steps, a copy of all state on the host, more steps; back to the copy, and these again."""
    import io

    import torch

    inputs = torch.randn(2 * _STEPS, _WIDTH, _WIDTH, generator=torch.Generator().manual_seed(5)).to(
        device.value
    )

    def train(first: int) -> list[Any]:
        for value in inputs[first : first + _STEPS]:
            optimizer.zero_grad(set_to_none=True)
            run(value).square().mean().backward()
            optimizer.step()
        return [parameter.detach().cpu().clone() for parameter in layer.parameters()]

    train(0)
    kept = io.BytesIO()
    torch.save([layer.state_dict(), optimizer.state_dict()], kept)
    wanted = train(_STEPS)
    kept.seek(0)
    model_state, optimizer_state = torch.load(kept, weights_only=False)
    layer.load_state_dict(model_state)
    optimizer.load_state_dict(optimizer_state)
    return all(map(torch.equal, train(_STEPS), wanted))
