"""Stand-ins for the state of Transformer Engine: its attributes and their meaning, on the CPU.

Own code, after the behaviour of Transformer Engine 2.8 to 2.12: the process-wide FP8 state with its
registers, modules that quantise, tensors that only wrap others, and FusedAdam with narrow moments
and masters. The arithmetic is simpler, with the same dependencies.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import fp8_utils
from torch import Tensor

LARGEST = 448.0
HISTORY = 4


@dataclass(frozen=True)
class Recipe:
    """``kind`` as Megatron names recipes."""

    kind: str

    def delayed(self) -> bool:
        return self.kind == "delayed"


class DelayedState:
    def __init__(self, recipe: Recipe, count: int) -> None:
        self.recipe = recipe
        self.scale = torch.ones(count)
        self.amax_history = torch.zeros(HISTORY, count)


class Manager:
    """FP8GlobalStateManager: everything is on the class, and there is one for the process."""

    FP8_ENABLED = False
    FP8_CALIBRATION = False
    FP8_RECIPE: Recipe | None = None
    FP8_DISTRIBUTED_GROUP: object = None
    FP8_GRAPH_CAPTURING = False
    IS_FIRST_FP8_MODULE = False
    AUTOCAST_DEPTH = 0
    global_amax_buffer: dict[str, list[Tensor]]
    global_amax_history_buffer: dict[str, list[Tensor]]
    global_scale_buffer: dict[str, list[Tensor]]
    fp8_tensors_recompute_buffer: list[deque[Any]]
    autocast_arguments: dict[str, tuple[Recipe, object]]
    # Not in the original: the sizes of all reductions.
    reduced: list[int]

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, meta: dict[str, Any]) -> None:
        if not meta["recipe"].delayed() or "buffer_index_and_autocast_key" in meta:
            return
        place = meta["buffer_index_and_autocast_key"] = []
        for direction, own in (("forward", "scaling_fwd"), ("backward", "scaling_bwd")):
            key = f"{direction}_{meta['recipe']}:{hash(meta['fp8_group'])}"
            state = meta[own]
            cls.global_amax_buffer.setdefault(key, []).append(state.amax_history[0])
            cls.global_amax_history_buffer.setdefault(key, []).append(state.amax_history)
            cls.global_scale_buffer.setdefault(key, []).append(state.scale)
            place += [len(cls.global_amax_buffer[key]) - 1, key]

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool) -> None:
        for key, amaxes in cls.global_amax_buffer.items():
            direction, arguments = key.split("_", 1)
            if (direction == "forward") != forward:
                continue
            assert arguments in cls.autocast_arguments
            cls.reduced.append(torch.cat(amaxes).numel())
            for history, scale in zip(
                cls.global_amax_history_buffer[key], cls.global_scale_buffer[key], strict=True
            ):
                amax = history.max(dim=0).values
                history.copy_(torch.roll(history, -1, 0))
                history[0].zero_()
                scale.copy_(torch.where(amax > 0, LARGEST / amax, scale))


@contextlib.contextmanager
def autocast(recipe: Recipe, group: object) -> Iterator[None]:
    names = ("FP8_ENABLED", "FP8_RECIPE", "FP8_DISTRIBUTED_GROUP", "IS_FIRST_FP8_MODULE")
    before = {name: getattr(Manager, name) for name in names}
    Manager.autocast_arguments[f"{recipe}:{hash(group)}"] = (recipe, group)
    Manager.FP8_ENABLED, Manager.FP8_RECIPE = True, recipe
    Manager.FP8_DISTRIBUTED_GROUP = group
    if Manager.AUTOCAST_DEPTH == 0:
        Manager.IS_FIRST_FP8_MODULE = True
    Manager.AUTOCAST_DEPTH += 1
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(Manager, name, value)
        Manager.AUTOCAST_DEPTH -= 1
        if Manager.AUTOCAST_DEPTH == 0 and torch.is_grad_enabled():
            Manager.reduce_and_update_fp8_tensors(forward=True)


class TransformerEngineBaseModule(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fp8_initialized = False
        self.fp8 = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False, "fp8_group": None}
        self.fp8_meta_tensors_initialized = False
        self._fp8_workspaces: dict[str, Tensor] = {}

    def states(self, recipe: Recipe, products: int) -> dict[str, Any]:
        kind = DelayedState if recipe.delayed() else lambda recipe, _: SimpleNamespace(r=recipe)
        return {
            "scaling_fwd": kind(recipe, products * 3),
            "scaling_bwd": kind(recipe, products * 2),
        }

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        self.fp8 = Manager.FP8_ENABLED
        if not self.fp8:
            self.fp8_initialized = False
            return
        recipe = Manager.FP8_RECIPE
        assert recipe is not None
        if self.fp8_initialized and recipe == self.fp8_meta["recipe"]:
            return
        self.fp8_meta |= {"recipe": recipe, "num_gemms": num_gemms}
        self.fp8_meta["fp8_group"] = Manager.FP8_DISTRIBUTED_GROUP
        if not self.fp8_meta_tensors_initialized:
            self.fp8_meta |= self.states(recipe, num_gemms)
            self.fp8_meta_tensors_initialized = True
        self.fp8_initialized = True

    def prepare(self, products: int) -> None:
        self.init_fp8_metadata(products)
        if self.fp8:
            Manager.add_fp8_tensors_to_global_buffer(self.fp8_meta)

    def quantise(self, tensor: Tensor, direction: str, index: int) -> Tensor:
        state = self.fp8_meta[direction]
        if not isinstance(state, DelayedState):
            scale = LARGEST / tensor.abs().max()
        else:
            scale = state.scale[index]
            place = state.amax_history[0]
            place[index] = torch.maximum(place[index], tensor.detach().abs().max())
        return (tensor.detach() * scale).clamp(-LARGEST, LARGEST).round() / scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, module: Linear) -> Tensor:
        ctx.module = module
        ctx.first = Manager.IS_FIRST_FP8_MODULE
        Manager.IS_FIRST_FP8_MODULE = False
        value = module.quantise(value, "scaling_fwd", 0)
        kept = module._fp8_workspaces
        if module.is_first_microbatch or "weight" not in kept:
            kept["weight"] = module.quantise(weight, "scaling_fwd", 1)
        ctx.save_for_backward(value, kept["weight"])
        return value @ kept["weight"]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        value, weight = ctx.saved_tensors
        grad = ctx.module.quantise(grads[0], "scaling_bwd", 0)
        if ctx.first:
            Manager.reduce_and_update_fp8_tensors(forward=False)
        return grad @ weight.T, value.T @ grad, None


class Linear(TransformerEngineBaseModule):
    """With Megatron's flag of the first micro-batch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(size, size) / size**0.5)
        self.is_first_microbatch = True

    def forward(self, value: Tensor) -> Tensor:
        self.prepare(getattr(self, "num_gemms", 1))
        found: Tensor = _Product.apply(value, self.weight, self)  # type: ignore[no-untyped-call]
        self.is_first_microbatch = False
        return found


class GroupedLinear(Linear):
    """Experts: one product for each."""

    num_gemms = 2


class DotProductAttention(TransformerEngineBaseModule):
    """Delayed for the softmax even where the rest is scaled tensorwise."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        own = Recipe("delayed")
        if Manager.FP8_ENABLED and own != Manager.FP8_RECIPE:
            with autocast(own, Manager.FP8_DISTRIBUTED_GROUP):
                super().init_fp8_metadata(1)
        else:
            super().init_fp8_metadata(num_gemms)

    def forward(self, value: Tensor) -> Tensor:
        self.prepare(3)
        return value + (self.quantise(value, "scaling_fwd", 0) - value).detach()


class Model(torch.nn.Module):
    """A chunk of a pipeline stage, whose layers run in another order than they are found in."""

    def __init__(self, layers: list[torch.nn.Module], recipe: str, **config: Any) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.config = SimpleNamespace(fp8="hybrid", fp8_recipe=recipe, **config)

    def forward(self, value: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            value = torch.tanh(layer(value))
        return value


@pytest.fixture
def transformer_engine(monkeypatch):
    """Imported, in a fresh process; Megatron's FP8 region for the model's config."""
    for name in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        monkeypatch.setattr(Manager, name, {}, raising=False)
    monkeypatch.setattr(Manager, "autocast_arguments", {}, raising=False)
    monkeypatch.setattr(Manager, "fp8_tensors_recompute_buffer", [], raising=False)
    monkeypatch.setattr(Manager, "reduced", [], raising=False)
    fp8: Any = ModuleType("fp8")
    fp8.FP8GlobalStateManager = Manager
    distributed: Any = ModuleType("distributed")
    vars(distributed).update(dict.fromkeys(RECOMPUTING, False))
    distributed.activation_recompute_forward = SimpleNamespace(_is_first_fp8_module=[])
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", fp8)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.distributed", distributed)
    group = object()
    monkeypatch.setattr(
        fp8_utils, "get_fp8_context", lambda config: autocast(Recipe(config.fp8_recipe), group)
    )
    return Manager


wrapper = torch.Tensor._make_wrapper_subclass
RECOMPUTING = ("_FP8_ACTIVATION_RECOMPUTE_ENABLED", "_FP8_ACTIVATION_RECOMPUTE_PHASE")


class Float8Tensor(torch.Tensor):
    """Wraps bytes and a factor; it has no values of its own that could be copied."""

    def __new__(cls, values: Tensor) -> Float8Tensor:
        made = wrapper(cls, values.shape, dtype=torch.float32)
        quantizer = SimpleNamespace(scale=torch.ones(1), amax=torch.zeros(1))
        data = torch.zeros(values.shape, dtype=torch.uint8)
        made.__dict__.update(_quantizer=quantizer, _data=data, _scale_inv=torch.ones(1))
        made.quantize_(values)
        return made

    def quantize_(self, values: Tensor) -> None:
        scaled = (values * self._quantizer.scale).to(torch.float8_e4m3fn)
        self._data.copy_(scaled.view(torch.uint8))
        self._scale_inv.copy_(1 / self._quantizer.scale)

    def float(self, *_: Any, **__: Any) -> Tensor:
        return self._data.view(torch.float8_e4m3fn).to(torch.float32) * self._scale_inv

    def detach(self) -> Float8Tensor:
        made = wrapper(type(self), self.shape, dtype=torch.float32)
        made.__dict__.update(self.__dict__)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        raise NotImplementedError(f"{func} on a quantised tensor")


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 tensor as bf16, rounded at the highest bit left out, and the 16 bits left out."""
    bits = master.view(torch.int32)
    rest = (bits & 0xFFFF).to(torch.int16)
    upper = (bits >> 16) + (rest < 0)
    return upper.to(torch.int16).view(torch.bfloat16), rest


def join(upper: Tensor, rest: Tensor) -> Tensor:
    """Inverse of :func:`split`."""
    high = upper.view(torch.int16).to(torch.int32) - (rest < 0).to(torch.int32)
    return ((high << 16) | (rest.to(torch.int32) & 0xFFFF)).view(torch.float32)


class FusedAdam(torch.optim.Optimizer):
    """Counts its steps in the groups; keeps narrow states with a factor each, by parameter."""

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        master_weights: bool = False,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        capturable: bool = False,
        **dtypes: torch.dtype,
    ) -> None:
        super().__init__(params, {"lr": torch.tensor(lr) if capturable else lr})
        self.capturable = capturable
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self.dtypes = {
            name: dtypes.get(f"{name}_dtype", torch.float32)
            for name in ("exp_avg", "exp_avg_sq", "master_param")
        }
        self._scales: dict[Tensor, dict[str, Tensor]] = {}

    def initialize_state(self, param: Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self._make(param, name, torch.zeros(param.shape))
        if self.master_weights and store_param_remainders:
            self.state[param]["master_param"] = torch.zeros(param.shape, dtype=torch.int16)
        elif self.master_weights:
            self._make(param, "master_param", param.detach().float())

    def _make(self, param: Tensor, name: str, values: Tensor) -> None:
        dtype = self.dtypes[name]
        state = self.state[param]
        state[name] = Float8Tensor(values) if dtype == torch.uint8 else values.to(dtype, copy=True)
        if dtype != torch.float32:
            self._scales.setdefault(param, {})[name] = torch.ones(1)
            self._put(param, name, values)

    def _get(self, param: Tensor, name: str) -> Tensor:
        stored = self.state[param][name]
        if self.dtypes[name] == torch.float16:
            return stored.float() * self._scales[param][name]
        return stored.float()

    def _put(self, param: Tensor, name: str, values: Tensor) -> None:
        stored, dtype = self.state[param][name], self.dtypes[name]
        if dtype in (torch.float32, torch.bfloat16):
            stored.copy_(values)
            return
        scale = self._scales[param][name]
        largest = LARGEST if dtype == torch.uint8 else torch.finfo(dtype).max / 2
        scale.copy_(values.abs().max().clamp(min=1e-30) / largest)
        if dtype == torch.uint8:
            stored._quantizer.scale.copy_(1 / scale)
            stored.quantize_(values)
        else:
            stored.copy_(values / scale)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = torch.zeros(1, dtype=torch.int) if self.capturable else 0
            group["step"] += 1
            for param in group["params"]:
                both = self.store_param_remainders and param.dtype == torch.bfloat16
                if not self.state[param]:
                    self.initialize_state(param, both)
                grad = param.decoupled_grad if self.use_decoupled_grad else param.grad
                mean = 0.9 * self._get(param, "exp_avg") + 0.1 * grad.float()
                square = 0.99 * self._get(param, "exp_avg_sq") + 0.01 * grad.float() ** 2
                masters = self.master_weights and param.dtype != torch.float32
                if masters and both:
                    master = join(param, self.state[param]["master_param"])
                else:
                    master = self._get(param, "master_param") if masters else param.float()
                corrected = mean / (1 - 0.9 ** float(group["step"]))
                master = master - float(group["lr"]) * corrected / (square.sqrt() + 1e-8)
                if masters and both:
                    upper, rest = split(master)
                    param.copy_(upper)
                    self.state[param]["master_param"].copy_(rest)
                else:
                    param.copy_(master)
                    if masters:
                        self._put(param, "master_param", master)
                self._put(param, "exp_avg", mean)
                self._put(param, "exp_avg_sq", square)

    def load_values(self, values: dict[Tensor, dict[str, Tensor]]) -> None:
        """Replace every state by another object, as ``load_state_dict`` does."""
        for param, found in values.items():
            self.state[param] = {}
            for name, tensor in found.items():
                if tensor.dtype == torch.int16:
                    self.state[param][name] = tensor.clone()
                else:
                    self._make(param, name, tensor)
