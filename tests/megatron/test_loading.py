"""A load of a checkpoint that fails leaves no trace: the next is as the first."""

from typing import Any

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.optimizer import FP32Optimizer

from deadpool_megatron.megatron.exact_load import exact_load
from deadpool_megatron.state.optimizer_state import parameters_of
from tests.megatron.gpu_rig import plain_inner


class Trained:
    """An optimizer of two parameters after two updates, as Megatron chains it."""

    def __init__(self) -> None:
        self.parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
        self.adam = torch.optim.Adam(self.parameters, lr=0.1)
        self.chained_optimizers = [plain_inner(self.adam)]
        for _ in range(2):
            self.update()

    def update(self) -> None:
        for number, parameter in enumerate(self.parameters):
            parameter.grad = torch.full((3,), 1.0 + number)
        self.adam.step()

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        """Do as Megatron, with a single step for all parameters of a group."""
        (group,) = self.adam.param_groups
        group["step"] = loaded["step"].clone()
        for number, parameter in enumerate(self.parameters):
            self.adam.state[parameter] = {
                "step": group["step"],
                **{name: loaded[name][number].clone() for name in ("exp_avg", "exp_avg_sq")},
            }
            if len(loaded["exp_avg"]) == number + 1 < len(self.parameters):
                raise OSError("the rest of the file is missing")

    def state(self) -> list[Any]:
        """Everything that the next update begins from."""
        held = [self.adam.state[parameter] for parameter in self.parameters]
        values = [{name: tensor.tolist() for name, tensor in state.items()} for state in held]
        return [values, [parameter.tolist() for parameter in self.parameters]]


def saved(parts: int = 2) -> dict[str, Any]:
    moments = [torch.full((3,), 0.5 * (number + 1)) for number in range(parts)]
    return {"step": torch.tensor(7.0), "exp_avg": moments, "exp_avg_sq": moments}


def load(trained: Any, loaded: dict[str, Any]) -> None:
    with exact_load(trained, None):
        trained.load_state_dict({"optimizer": {"state": {}}, **loaded})


def test_checkpoint_after_one_that_could_not_be_loaded_is_loaded_as_the_first():
    at_once, later = Trained(), Trained()
    before = later.state()
    kept = [dict(later.adam.state[parameter]) for parameter in later.parameters]
    with pytest.raises(OSError, match="is missing"):
        load(later, saved(parts=1))
    assert later.state() == before
    for trained in (at_once, later):
        load(trained, saved())
    for parameter, tensors in zip(later.parameters, kept, strict=True):
        found = later.adam.state[parameter]
        assert all(found[name] is tensor for name, tensor in tensors.items()), "in their place"
    assert later.state() == at_once.state()
    for trained in (at_once, later):
        trained.update()
    assert later.state() == at_once.state()
    assert [state["step"] for state in later.state()[0]] == [8.0, 8.0]


class Rated:
    """Two parameters of a kind with rates of their own, as --decoupled-lr makes them."""

    def __init__(self, *rates: float) -> None:
        kind = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False}
        groups = [
            {**kind, "is_decoupled_lr": False, "max_lr": rate, "min_lr": 0.0, "lr": rate / 2}
            for rate in rates
        ]
        adam = torch.optim.AdamW(
            [{"params": [torch.nn.Parameter(torch.ones(3))], **group} for group in groups]
        )
        self.optimizer = FP32Optimizer(adam, OptimizerConfig(), lambda *_: None)

        for parameter in parameters_of(adam):
            parameter.grad = torch.zeros(3)
        adam.step()

    def rates(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("own", [(1.0, 2.0), (2.0, 1.0), (1.0,)])
def test_groups_of_a_kind_are_loaded_by_their_rates(own):
    """Those of a checkpoint are role 0's; others may have them in another order, or some only."""
    saved = Rated(1.0, 2.0).optimizer.state_dict()
    loaded = Rated(*own)
    for group in loaded.optimizer.param_groups:
        group["lr"] = 9.0
    with exact_load(loaded.optimizer, None):
        loaded.optimizer.load_state_dict(saved)
    assert loaded.rates() == [rate / 2 for rate in own]


def test_optimizer_without_a_first_state_has_one_to_load_into():
    """Megatron has none for SGD, and makes what it loads into by it."""
    weight = torch.nn.Parameter(torch.ones(3))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer = FP32Optimizer(sgd, OptimizerConfig(), None)
    with exact_load(optimizer, None):
        optimizer.init_state_fn(sgd, optimizer.config)
    assert sgd.state[weight]["momentum_buffer"].tolist() == [0.0] * 3


@pytest.mark.parametrize("moment", ["exp_avg", "momentum_buffer"])
def test_step_of_zero_is_put_back_for_adam_alone(moment):
    """Megatron does not write it. Muon, which is loaded with an Adam of its own, keeps none."""
    trained, found = Trained(), []
    trained.load_state_dict = found.append
    load(trained, {"optimizer": {"state": {0: {moment: torch.zeros(3)}}}})
    assert ("common_step" in found[0]["optimizer"]["state"]) is (moment == "exp_avg")
