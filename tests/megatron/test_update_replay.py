"""The replay of an update from the state before it and its gradients: equal bytes, or a refusal."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from deadpool_megatron.layout.records import gradients_part
from deadpool_megatron.megatron import optimizer as optimizers, update_replay
from deadpool_megatron.state.initial_state import complete_adam
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.state.parts import Part, move_into_arenas
from tests.state.loading import load

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
        self.gradients = Part(gradients_part("shard0"), self.parameters, (0,))
        self.hooked: list[object] = []
        self.adam.register_step_pre_hook(lambda *_: self.hooked.append(self))

    def bytes_now(self) -> memoryview:
        held = memoryview(bytearray(self.part.nbytes))
        for view, tensor in zip(self.part.views(held), self.part.tensors, strict=True):
            view.copy_(tensor)
        return held

    def update(self, lr: float) -> tuple[update_replay.InnerUpdate, memoryview]:
        """A live update; the second parameter has no gradient."""
        held = memoryview(bytearray(self.gradients.nbytes))
        for number, view in enumerate(self.gradients.views(held)):
            view.copy_(torch.randn(view.shape))
            self.parameters[number].grad = None if number == 1 else view.clone()
        for group in self.adam.param_groups:
            group["lr"] = lr
        used = update_replay.InnerUpdate(update_replay.used_values(self.inner), (1,))
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        for group in self.adam.param_groups:
            group["lr"] = -1.0  # as a scheduler changes it
        return update_replay.InnerUpdate.from_dict(used.to_dict()), held

    def views(self, held: memoryview) -> list[Tensor]:
        return self.gradients.views(held)


@pytest.mark.parametrize("name", FLAGS)
def test_replay_gives_the_bytes_of_the_updates(name):
    rig = Rig(*FLAGS[name])
    start = rig.bytes_now()
    updates = [rig.update(lr) for lr in (1e-2, 5e-3, 1e-3)]
    wanted = rig.bytes_now()
    assert start != wanted
    load(rig.part, start)
    for used, held in updates:
        update_replay.replay(rig.inner, used, rig.views(held))
    assert rig.bytes_now() == wanted
    assert len(rig.hooked) == 3, "a replay calls no hooks"
    assert rig.adam.param_groups[1]["betas"] == (0.8, 0.9)
    assert all(parameter.grad is None for parameter in rig.parameters)
    # A live update after a replay is what it would have been.
    after, _ = rig.update(1e-3), load(rig.part, wanted)
    assert after is not None
    assert len(rig.hooked) == 4


@pytest.mark.parametrize("name", FLAGS)
def test_rehearsal_works_on_copies_and_finds_a_wrong_bit(name, monkeypatch):
    monkeypatch.setattr("deadpool_megatron.megatron.update_replay._CHUNK_BYTES", 500)
    rig = Rig(*FLAGS[name])
    rig.update(1e-2)
    before = rig.bytes_now()
    used, held = rig.update(5e-3)
    after = rig.bytes_now()

    def compare(update: Any = used, before: Any = before, held: Any = held, to: Any = after) -> str:
        found = update_replay.rehearse(rig.inner, update, rig.part, before, rig.views(held), to)
        assert rig.bytes_now() == after, "the live state is left alone"
        return found

    assert compare() == ""
    wrong = memoryview(bytearray(held))
    rig.views(wrong)[3][7] += 1
    assert "of parameter 3" in compare(held=wrong)
    other = memoryview(bytearray(before))
    rig.part.slice(other, rig.adam.state[rig.parameters[0]]["exp_avg"])[0, 0] += 1
    assert "of parameter 0" in compare(before=other)
    groups = [{**values, "lr": 4e-3} for values in used.groups]
    changed = update_replay.InnerUpdate(tuple(groups), used.without_gradient)
    assert compare(changed) == "parameter of parameter 0"
    assert "of parameter 0" in compare(to=before)


def test_replay_removes_values_that_groups_had_not():
    """FusedAdam counts its steps in the groups, from its first update on."""
    rig = Rig(*FLAGS["adamw-foreach"])
    start = rig.bytes_now()
    used, held = rig.update(1e-2)
    load(rig.part, start)
    rig.adam.param_groups[0]["step"] = 7
    update_replay.replay(rig.inner, used, rig.views(held))
    assert "step" not in rig.adam.param_groups[0]
    assert len(optimizers.parameters_of(rig.inner)) == 5


def test_unreplayable_optimizers_are_refused():
    rig = Rig(*FLAGS["adamw-foreach"])
    chained = SimpleNamespace(chained_optimizers=[rig.inner])
    update_replay.refuse_unreplayable(chained)
    rig.inner.config = SimpleNamespace(use_precision_aware_optimizer=True)
    with pytest.raises(UnsupportedState, match="precision-aware"):
        update_replay.refuse_unreplayable(chained)
    momentum = SimpleNamespace(optimizer=torch.optim.SGD(rig.parameters, lr=0.1))
    with pytest.raises(UnsupportedState, match=r"not for SGD.*use --deadpool-protection"):
        update_replay.refuse_unreplayable(SimpleNamespace(chained_optimizers=[momentum]))
    rig.adam.param_groups[0]["lr"] = torch.tensor(0.1)
    del rig.inner.config
    with pytest.raises(UnsupportedState, match="capturable"):
        update_replay.refuse_unreplayable(chained)
