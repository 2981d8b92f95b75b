"""State that Transformer Engine keeps for training in FP8: its capture, restore and reset.

With delayed scaling every module has scaling factors and histories of largest values (amax) that
each forward and each backward pass changes, and that follow from no parameter: unique state. With
tensorwise scaling, attention in FP8 has such state for its softmax. Apart from that, tensorwise,
blockwise and MXFP8 scaling keep no state: their factors are computed from the current values, and
caches of the factors are made again. Of this module these recipes need only
:func:`reset_in_flight`.

Transformer Engine collects the amaxes of all modules of a process in registers (its global
buffers), in the order of the modules' first forward passes. Peers reduce a register in one
collective, so its modules and their order are state as well: they are captured and restored.

This module was written from the sources and has never run, as it needs a GPU. The sources are
Transformer Engine 2.8 to 2.12, pytorch/quantization.py (fp8.py before 2.9), pytorch/module/base.py,
pytorch/distributed.py, pytorch/attention/dot_product_attention/dot_product_attention.py;
Megatron-core 0.16.1, core/fp8_utils.py. Transformer Engine is not imported: objects are recognised
by their attributes.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import fp8_utils
from torch import Tensor

from deadpool_megatron.megatron.loop import MegatronLoop, model_config, trains_in_fp8
from deadpool_megatron.megatron.optimizer import raw_tensors
from deadpool_megatron.state.extras import ExtrasError
from deadpool_megatron.state.optimizer_state import UnsupportedState

_DIRECTIONS = ("scaling_fwd", "scaling_bwd")
_KINDS = ("scale", "scale_inv", "amax_history")
# The process-wide registers, and where a module keeps its places in them.
_REGISTERS = ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer")
_PLACE = "buffer_index_and_autocast_key"
# Values of the state manager outside of any autocast region; the depth was renamed in 2.9.
_OUTSIDE = {
    "FP8_ENABLED": False,
    "FP8_CALIBRATION": False,
    "FP8_RECIPE": None,
    "FP8_DISTRIBUTED_GROUP": None,
    "FP8_GRAPH_CAPTURING": False,
    "IS_FIRST_FP8_MODULE": False,
    "AUTOCAST_DEPTH": 0,
    "FP8_AUTOCAST_DEPTH": 0,
}
# The matrix products of a module, as its forward pass counts them (num_gemms of prepare_forward).
_PRODUCTS = {"Linear": 1, "LayerNormLinear": 1, "LayerNormMLP": 2, "DotProductAttention": 3}

_Modules = list[tuple[str, Any]]
# The modules whose FP8 state exists.
_initialised: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def capture(loop: MegatronLoop) -> dict[str, Any]:
    """Return the extras of FP8: a tensor for each dtype, so that few copies are enough.

    The first call creates the state that the first forward pass would create. So extras have their
    final size from the start, and a process without a forward pass has tensors to restore into.
    """
    modules = _quantising(loop)
    if not modules:
        return {}
    values: dict[str, Any] = {"fp8.layout": _layout(modules), "fp8.registered": _order(modules)}
    for dtype, group in _by_dtype(modules).items():
        values[f"fp8.values.{dtype}"] = torch.cat([tensor.reshape(-1) for tensor in group])
    return values


def restore(loop: MegatronLoop, values: Mapping[str, Any]) -> None:
    """Inverse of :func:`capture`, in place: quantizers and registers refer to these tensors.

    Raises ExtrasError if the loop quantises in other modules than the captured loop.
    """
    modules = _quantising(loop)
    if values.get("fp8.layout") != (_layout(modules) if modules else None):
        raise ExtrasError("modules that train in FP8 differ from those that were captured")
    if not modules:
        return
    with torch.no_grad():
        for dtype, group in _by_dtype(modules).items():
            flat = values[f"fp8.values.{dtype}"].to(group[0].device)
            pieces = flat.split([tensor.numel() for tensor in group])
            shaped = [piece.view_as(tensor) for piece, tensor in zip(pieces, group, strict=True)]
            torch._foreach_copy_(group, shaped)
    _register(modules, values["fp8.registered"])


def reset_in_flight(model_chunks: Sequence[Any]) -> None:
    """Clear the remains of an interrupted step, and the caches of its weights.

    Stale entries of an interrupted recomputation would be taken for those of the next
    recomputation. Without an error, it would use scaling factors of another micro-batch, and reduce
    another number of times.
    """
    modules = _modules(model_chunks if _initialised else ())
    if not any(module in _initialised for _, module in modules):
        return  # not in FP8
    manager = _manager()
    for name, value in _OUTSIDE.items():
        if hasattr(manager, name):
            setattr(manager, name, value)
    for waiting in manager.fp8_tensors_recompute_buffer:
        waiting.clear()
    recomputing: Any = sys.modules["transformer_engine.pytorch.distributed"]
    recomputing._FP8_ACTIVATION_RECOMPUTE_ENABLED = False
    recomputing._FP8_ACTIVATION_RECOMPUTE_PHASE = False
    recomputing.activation_recompute_forward._is_first_fp8_module.clear()
    # This also drops the registrations of a model that the process had before.
    _register(modules, _order(modules))
    for _, module in modules:
        module._fp8_workspaces.clear()
        if hasattr(module, "is_first_microbatch"):
            module.is_first_microbatch = True


def finish_gather(model_chunks: Sequence[Any]) -> None:
    """Process weights in FP8 for backward passes, after a forced gather of parameters.

    When gathers overlap, Megatron does this only in its forward pre-hooks, which may be off in the
    next step. Doing it twice does no harm.
    """
    quantised = [
        parameter
        for chunk in (model_chunks if _initialised else ())
        for parameter in chunk.parameters()
        if parameter.requires_grad and raw_tensors(parameter)
    ]
    if quantised:
        fp8_utils.post_all_gather_processing(quantised)


def named_tensors(model_chunks: Sequence[Any]) -> list[tuple[str, Tensor]]:
    """Return scaling factors and histories of all modules, in the same order on equal roles."""
    return _tensors(_modules(model_chunks))


def _modules(model_chunks: Sequence[Any]) -> _Modules:
    """Return Transformer Engine's modules, whether they quantise or not."""
    return [
        (f"{index}.{name}", module)
        for index, chunk in enumerate(model_chunks)
        for name, module in chunk.named_modules()
        if isinstance(getattr(module, "fp8_meta", None), dict)
    ]


def _quantising(loop: MegatronLoop) -> _Modules:
    """Return and initialise Transformer Engine's modules; none if training is not in FP8."""
    modules = _modules(loop.model_chunks)
    if not modules or not trains_in_fp8(loop):
        return []
    waiting = [(name, module) for name, module in modules if module not in _initialised]
    if waiting:
        _initialise(loop.model_chunks, waiting, model_config(loop))
    return modules


def _initialise(model_chunks: Sequence[Any], waiting: _Modules, config: Any) -> None:
    """Initialise modules as the first forward pass in Megatron's own FP8 region does.

    Raises UnsupportedState for FP8 state that could not be captured or compared.
    """
    if not all(isinstance(getattr(_manager(), name, None), dict) for name in _REGISTERS):
        raise UnsupportedState(
            "this version of Transformer Engine keeps FP8 state in a place that is not known;"
            " 2.8 to 2.12 were read"
        )
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            if raw_tensors(parameter) and not parameter.requires_grad:
                raise UnsupportedState(f"{name} is frozen and in FP8: it cannot be cast again")
        for name, module in chunk.named_modules():
            if hasattr(module, "_fused_impl"):  # Megatron's TEFusedMLP
                raise UnsupportedState(f"{name}: fused operations keep FP8 state of their own")
    # With gradients, leaving the region would reduce amaxes and shift the histories.
    with torch.no_grad(), fp8_utils.get_fp8_context(config):
        for name, module in waiting:
            module.init_fp8_metadata(num_gemms=_products(name, module))
            _initialised.add(module)


def _products(name: str, module: Any) -> int:
    if isinstance(count := getattr(module, "num_gemms", None), int):
        return count  # GroupedLinear
    for kind in type(module).__mro__:
        if kind.__name__ in _PRODUCTS:
            return _PRODUCTS[kind.__name__]
    raise UnsupportedState(f"{name}: the FP8 state of a {type(module).__name__} is not known")


def _manager() -> Any:
    """Return Transformer Engine's class of process-wide FP8 state, if it is imported."""
    # The name that Megatron imports it by, in all versions.
    module = sys.modules.get("transformer_engine.pytorch.fp8")
    return getattr(module, "FP8GlobalStateManager", None)


def _order(modules: _Modules) -> list[int]:
    """Return the numbers of the registered modules, in the order of their registration."""
    # A module enters the registers of both directions at once, the forward register first.
    keys = {key: number for number, key in enumerate(_manager().global_amax_buffer)}
    places = [
        (keys[place[1]], place[0], number)
        for number, (_, module) in enumerate(modules)
        if (place := module.fp8_meta.get(_PLACE)) and place[1] in keys
    ]
    return [number for *_, number in sorted(places)]


def _register(modules: _Modules, order: Sequence[int]) -> None:
    """Clear the registers, and register the modules with these numbers, in this order."""
    manager = _manager()
    for name in _REGISTERS:
        getattr(manager, name).clear()
    for _, module in modules:
        module.fp8_meta.pop(_PLACE, None)
    for number in order:
        manager.add_fp8_tensors_to_global_buffer(modules[number][1].fp8_meta)


def _by_dtype(modules: _Modules) -> dict[str, list[Tensor]]:
    groups: dict[str, list[Tensor]] = {}
    for _, tensor in _tensors(modules):
        groups.setdefault(str(tensor.dtype).removeprefix("torch."), []).append(tensor)
    return groups


def _tensors(modules: _Modules) -> list[tuple[str, Tensor]]:
    # The states of recipes without a history hold settings, no tensors.
    return [
        (f"{name}.{direction}.{kind}", tensor.detach())
        for name, module in modules
        for direction in _DIRECTIONS
        for kind in _KINDS
        if isinstance(tensor := getattr(module.fp8_meta.get(direction), kind, None), Tensor)
    ]


def _layout(modules: _Modules) -> str:
    """Return a digest that is equal for the same modules and tensors in the same order."""
    text = [name for name, _ in modules]
    text += [f"{name}{tuple(t.shape)}{t.dtype}" for name, t in _tensors(modules)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()
