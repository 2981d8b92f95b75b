"""The replay of an update from the state before it and its gradients: equal bytes, or a refusal."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deadpool_megatron.megatron.audit import update_replay
from deadpool_megatron.state.initial_state import complete_adam, same_bytes
from deadpool_megatron.state.parts import Part, move_into_arenas

FLAGS = {
    "adam-weight-decay": (torch.optim.Adam, {"weight_decay": 0.1, "foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"weight_decay": 0.1, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"weight_decay": 0.01, "fused": True}),
}


class Rig:
    """One inner optimizer on packed tensors, some of which are views of another buffer."""

    def __init__(self, kind: Any, flags: dict[str, Any]) -> None:
        torch.manual_seed(3)
        whole = torch.randn(70)
        tensors = [torch.randn(33, 3), torch.randn(5), whole[:40], whole[40:], torch.randn(0)]
        self.parameters = [torch.nn.Parameter(tensor) for tensor in tensors]
        groups = [
            {"params": self.parameters[:2], "lr": 1e-2, "name": "decayed"},
            {"params": self.parameters[2:], "lr": 3e-3, "betas": (0.8, 0.9)},
        ]
        self.adam = kind(groups, **flags)
        self.inner = SimpleNamespace(optimizer=self.adam)
        complete_adam(self.adam)
        state = [t for p in self.parameters for t in self.adam.state[p].values()]
        self.part = Part("shard0", move_into_arenas([*self.parameters, *state]), (0,))
        self.hooked: list[object] = []
        self.adam.register_step_pre_hook(lambda *_: self.hooked.append(self))

    def bytes_now(self) -> memoryview:
        held = memoryview(bytearray(self.part.nbytes))
        for view, tensor in zip(self.part.views(held), self.part.tensors, strict=True):
            view.copy_(tensor)
        return held

    def update(self, lr: float) -> tuple[Any, list[Tensor | None]]:
        """A live update, its values and its gradients; the second parameter has none."""
        gradients = [
            torch.randn(p.shape) if p is not self.parameters[1] else None for p in self.parameters
        ]
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        for group in self.adam.param_groups:
            group["lr"] = lr
        used = update_replay.plain_group_values(self.inner)
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        for group in self.adam.param_groups:
            group["lr"] = -1.0  # as a scheduler changes it
        return used, gradients

    def copies(self) -> list[update_replay.ParameterCopy]:
        """The state of now on memory of its own."""
        numbers, found = update_replay.group_numbers(self.inner), []
        for chunk in update_replay.chunks(self.inner):
            for parameter in chunk:
                tensors = {
                    n: t.detach().clone()
                    for n, t in update_replay.all_tensors(self.inner, parameter)
                }
                number = len(found)
                found.append(update_replay.ParameterCopy(number, numbers[number], tensors, {}))
        return found


@pytest.mark.parametrize("name", FLAGS)
def test_replay_on_copies_gives_the_bytes_of_the_updates(name, monkeypatch):
    monkeypatch.setattr(update_replay, "_CHUNK_BYTES", 500)
    rig = Rig(*FLAGS[name])
    rig.update(1e-2)
    copies = rig.copies()
    for lr in (5e-3, 1e-3):
        used, gradients = rig.update(lr)
        before = rig.bytes_now()
        for copy, gradient in zip(copies, gradients, strict=True):
            copy.parameter.grad = gradient
        update_replay.update_copies(rig.inner, used, copies)
        assert rig.bytes_now() == before, "the live state is left alone"
        for copy, live in zip(copies, rig.copies(), strict=True):
            assert all(same_bytes(copy.tensors[n], tensor) for n, tensor in live.tensors.items())
    assert len(rig.hooked) == 3, "a replay calls no hooks"


def test_unreplayable_optimizers_are_refused():
    rig = Rig(*FLAGS["adamw-foreach"])
    chained = SimpleNamespace(chained_optimizers=[rig.inner])
    assert update_replay.replay_refusal(chained) == ""
    rig.inner.config = SimpleNamespace(use_precision_aware_optimizer=True)
    assert "precision-aware" in update_replay.replay_refusal(chained)
    momentum = SimpleNamespace(optimizer=torch.optim.SGD(rig.parameters, lr=0.1))
    found = update_replay.replay_refusal(SimpleNamespace(chained_optimizers=[momentum]))
    assert "not for SGD" in found
    rig.adam.param_groups[0]["lr"] = torch.tensor(0.1)
    del rig.inner.config
    assert "capturable" in update_replay.replay_refusal(chained)
