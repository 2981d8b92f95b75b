"""Stands in for NVIDIA's package of the same name, which needs Python 3.12: as much of it as Muon
of Megatron-LM (core_v0.16.1 to 0.19) takes.

Own code, after the behaviour of emerging_optimizers 0.3: one momentum for each matrix, zeros at
first, updated in place; its update is orthogonalised by a Newton-Schulz iteration, over the slices
of tensor-parallel peers where there are any.
"""

import sys
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

NSCoeffT = Literal["quintic"]


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    """Keyword arguments have changed their names; so has what is in the groups."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float,
        *,
        scaled_orthogonalize_fn: Any,
        **kwargs: Any,
    ) -> None:
        self.nesterov = kwargs.get("nesterov", kwargs.get("use_nesterov", False))
        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn
        weight_decay = kwargs["weight_decay"]
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for parameter in group["params"]:
            if not (skip_non_grad_params and parameter.grad is None):
                state = self.state[parameter]
                state.setdefault("momentum_buffer", torch.zeros_like(parameter.data))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            self._init_group(group)
            for parameter in group["params"]:
                if (grad := parameter.grad) is None:
                    continue
                parameter.add_(parameter, alpha=-group["weight_decay"] * group["lr"])
                kept = self.state[parameter]["momentum_buffer"]
                kept.lerp_(grad, 1 - group["momentum"])
                used = grad.lerp(kept, group["momentum"]) if self.nesterov else kept
                parameter.add_(self.orthogonalize(parameter, used), alpha=-group["lr"])

    def orthogonalize(self, p: Tensor, grad: Tensor, **_: Any) -> Tensor:
        raise NotImplementedError


class AdaptiveMuon(OrthogonalizedOptimizer):
    pass


class Lion(torch.optim.Optimizer):
    pass


class SOAP(torch.optim.Optimizer):
    pass


def get_muon_scale_factor(rows: int, columns: int, mode: str = "spectral") -> float:
    return float(max(rows, columns) ** 0.5) if mode == "spectral" else 1.0


def newton_schulz_tp(
    x: Tensor, steps: int, tp_group: Any, partition_dim: int | None, **_: Any
) -> Tensor:
    if partition_dim is None or tp_group is None or dist.get_world_size(tp_group) == 1:
        return _newton_schulz(x, steps)
    slices = [torch.empty_like(x) for _ in range(dist.get_world_size(tp_group))]
    dist.all_gather(slices, x.contiguous(), group=tp_group)
    whole = _newton_schulz(torch.cat(slices, dim=partition_dim), steps)
    return whole.chunk(len(slices), dim=partition_dim)[dist.get_rank(tp_group)].contiguous()


def _newton_schulz(x: Tensor, steps: int) -> Tensor:
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def get_optimizer_name_list() -> list[str]:
    return []


# An import of any module of the package finds this module.
_name = "emerging_optimizers"
_within = ("registry", "scalar_optimizers", "soap", "orthogonalized_optimizers")
for _one in (*_within, "orthogonalized_optimizers.muon_utils"):
    sys.modules[f"{_name}.{_one}"] = sys.modules[_name]
registry = sys.modules[_name]
