"""Part kernels: optimizers and layers of a GPU's stack, put back from what was captured.

Training that goes on from a slot in shared memory, into which its state was copied as in a run, has
to give the same bits as training that went on by itself. What is not installed is told, and is no
failure.
"""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from proof.device import Device, Size
from proof.result import Findings

_WIDTH = 256
_STEPS = 4
_EXTRAS_BYTES = 4096
_COPY_SECONDS = 30.0


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
    """Steps, a copy of all state into a slot, more steps; back to the copy, and these again."""
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
    with _slot_of(_state_tensors(layer, optimizer)) as (capture, put_back):
        groups = [dict(group) for group in optimizer.param_groups]  # FusedAdam counts steps there
        capture()
        wanted = train(_STEPS)
        put_back()
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        return all(map(torch.equal, train(_STEPS), wanted))


def _state_tensors(layer: Any, optimizer: Any) -> list[Any]:
    """Weights, buffers, the optimizer's state, and what FP8 keeps beside them."""
    import torch

    from deadpool_megatron.hooks.training_state import fp8_state

    kept = [v for state in optimizer.state.values() for v in state.values()]
    scales = [tensor for _, tensor in fp8_state.named_tensors([layer])]
    return [
        *(*layer.parameters(), *layer.buffers()),
        *(*(value for value in kept if isinstance(value, torch.Tensor)), *scales),
    ]


@contextlib.contextmanager
def _slot_of(tensors: list[Any]) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """What copies the tensors into a slot and seals it, and what brings them back, if the bytes are
    those that were sealed."""
    from deadpool_megatron.hooks.generations.layouts import role_layout
    from deadpool_megatron.layout.records import Generation, Seat
    from deadpool_megatron.platform import select_platform
    from deadpool_megatron.state.packing import Part
    from deadpool_megatron.vault.shm.names import own_name
    from deadpool_megatron.vault.shm.segment import Segment, checksum

    platform, part, seat = select_platform(), Part("shard", tensors, (0,)), Seat(0, 0, 0)
    layout = role_layout(0, [part], _EXTRAS_BYTES, [0], 2, "kernels")
    with tempfile.TemporaryDirectory(prefix="deadpool-kernels-", dir="/dev/shm") as directory:
        path = Path(directory) / own_name(0, seat)
        segment = Segment.create(path, layout, seat, (part.name,))
        slot = segment.data(0, part.name, part.nbytes)
        views = part.views(slot)
        pinned = platform.is_cuda
        if pinned:
            platform.register_host_memory(slot)

        def capture() -> None:
            segment.open_slot(0, Generation(1, _STEPS), 1)
            copy = platform.side_copy(views, part.tensors)
            assert copy.wait(_COPY_SECONDS), "the copy into the slot has not ended"
            segment.seal_part(0, part.name, part.nbytes, checksum(slot), 1)

        def put_back() -> None:
            assert checksum(slot) == segment.entry(0, part.name).checksum
            copy = platform.side_copy(part.tensors, views)
            assert copy.wait(_COPY_SECONDS), "the copy out of the slot has not ended"

        try:
            yield capture, put_back
        finally:
            if pinned:
                platform.unregister_host_memory(slot)
