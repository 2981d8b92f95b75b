"""Megatron's optimizers: their state as parts, and the calls around their updates.

``get_megatron_optimizer`` returns a ChainedOptimizer of inner optimizers (dense, expert, ...). Each
inner optimizer becomes a part, because each shares its bytes with another set of roles.

The code for FusedAdam, in particular for Megatron's precision-aware use of it, was written from the
sources and has never run: it needs a GPU. The sources are Transformer Engine 2.8 to 2.12,
pytorch/optimizers/fused_adam.py and pytorch/tensor/float8_tensor.py; Apex 25.09,
optimizers/fused_adam.py; Megatron-core 0.16.1, core/optimizer/{__init__,distrib_optimizer}.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
from torch import Tensor

from deadpool_megatron.member.framework import StepCalls
from deadpool_megatron.state import initial_state, optimizer_state
from deadpool_megatron.state.optimizer_state import OptimizerState, Place, UnsupportedState
from deadpool_megatron.state.parts import Part
from deadpool_megatron.support import flags

# Keys of a parameter group: the bounds of its learning rate and weight decay.
_RATES = ("max_lr", "min_lr", "start_wd", "end_wd")
_FP8_RECIPES = frozenset({"delayed", "tensorwise", "blockwise", "mxfp8"})


def inner_optimizers(optimizer: Any) -> list[Any]:
    """Return the inner optimizers that hold state, not stubs of ranks without parameters."""
    chained = _chained(optimizer)
    return [inner for inner in chained if not getattr(inner, "is_stub_optimizer", False)]


def _chained(optimizer: Any) -> list[Any]:
    """Return the optimizers that chain no other optimizers, in order: chains may be nested (since
    0.18, with dense and layer-wise optimizers)."""
    if not hasattr(optimizer, "chained_optimizers"):
        return [optimizer]
    return [inner for link in optimizer.chained_optimizers for inner in _chained(link)]


def layer_wise(optimizer: Any) -> list[LayerWiseDistributedOptimizer]:
    """Return the chains that distribute whole parameters over data-parallel ranks: each rank
    updates its own parameters, and gathers those of the other ranks."""
    links = [optimizer, *getattr(optimizer, "chained_optimizers", ())]
    return [link for link in links if isinstance(link, LayerWiseDistributedOptimizer)]


def loss_scalers(optimizer: Any) -> dict[str, Any]:
    """Return the loss scalers of all optimizers by name, those of stubs included: Megatron takes
    the scale of the loss from the first optimizer, even from a stub
    (``ChainedOptimizer.get_loss_scale``)."""
    chained = _chained(optimizer)
    inner = inner_optimizers(optimizer)
    names = [
        f"scaler{inner.index(link)}" if link in inner else f"scaler_of_stub{number}"
        for number, link in enumerate(chained)
    ]
    scalers = [getattr(link, "grad_scaler", None) for link in chained]
    return {name: scaler for name, scaler in zip(names, scalers, strict=True) if scaler is not None}


def is_distributed(inner: Any) -> bool:
    """Return whether each data-parallel peer has a shard of the state."""
    return isinstance(inner, DistributedOptimizer)


def refuse_lossy_saves(optimizer: Any, args: Any) -> None:
    """Raise UnsupportedState where Megatron's own checkpoints lack state: a run that falls back to
    such a checkpoint would continue with zeros. (core_v0.19.0: get_parameter_state_dp_zero gathers
    buckets without their padding, while the places of parameters include it.)"""
    if not saves_by_parameter(args):
        return
    distributed = filter(is_distributed, inner_optimizers(optimizer))
    if any(
        bucket.grad_data.numel() != bucket.numel_unpadded
        for inner in distributed
        for buffer in inner.buffers
        for bucket in buffer.buckets[:-1]
    ):
        raise UnsupportedState(
            "--dist-ckpt-optim-fully-reshardable with --save: Megatron-LM writes zeros for some"
            " optimizer state, as buckets of parameters are padded: leave the flag out"
        )


def saves_by_parameter(args: Any) -> bool:
    """Return whether checkpoints are written with ``--dist-ckpt-optim-fully-reshardable``."""
    return bool(args.save) and bool(getattr(args, "dist_ckpt_optim_fully_reshardable", False))


def refuse_unknown_state(optimizer: Any, config: Any) -> None:
    """Raise UnsupportedState where state is known to lie outside of parts and extras.

    ``config`` is the model's. After a restore of less than all state, training would continue with
    other numbers.
    """
    inner = inner_optimizers(optimizer)
    # The configuration of a model follows from the flags, or from a program that sets it.
    refused = [row.line for row in flags.REFUSED if row.applies(config)]
    for reason in (*refused, _refused_low_precision(config, inner), *map(_refused_adam, inner)):
        if reason:
            raise UnsupportedState(reason)


def _refused_low_precision(config: Any, inner: list[Any]) -> str:
    """Return the reason why the state of this FP8 or FP4 cannot be captured (:mod:`.fp8`); empty if
    it can."""
    if not getattr(config, "fp8", None):
        return ""
    recipe = getattr(config, "fp8_recipe", "delayed")
    name = getattr(recipe, "value", recipe)
    if recipe not in _FP8_RECIPES:
        return f"fp8 recipe {name}: its quantizers may keep unknown state"
    if not getattr(config, "fp8_param", False):
        return ""
    # FP8 weights are derived: cast again from the master weights, with amaxes reduced over the
    # data-parallel group (distrib_optimizer.py, _copy_main_params_to_model_params; Transformer
    # Engine, pytorch/tensor/utils.py). That gives the same bytes if the scale is the same.
    if recipe == "mxfp8":
        return "weights in MXFP8 are gathered in the buffer of gradients, which a recovery empties"
    if not all(map(is_distributed, inner)):
        return "weights in FP8 can be cast again by the distributed optimizer only"
    if any(map(masters_in_adam, inner)):
        return "weights in FP8 that the precision-aware optimizer casts itself cannot be cast again"
    if recipe == "delayed" and any(getattr(each, "grad_scaler", None) for each in inner):
        return (
            "weights in FP8, delayed scaling and a loss scaler: after a skipped update nobody knows"
            " the scale with which the weights were cast"
        )
    return ""


def _refused_adam(inner: Any) -> str:
    """Return the reason why the state of this inner optimizer is not known; empty if it is."""
    if not hasattr(inner, "optimizer"):
        return f"{type(inner).__name__} in fp32, which Megatron does not wrap: give --bf16"
    fused = hasattr(inner.optimizer, "initialize_state") or is_hybrid(inner)
    if getattr(inner.config, "use_precision_aware_optimizer", False) and not fused:
        kind = type(inner.optimizer).__name__
        return f"the precision-aware use of {kind}: only Transformer Engine's FusedAdam is known"
    if getattr(inner.optimizer, "master_weights", False) and not fused:
        # Apex: param_groups_master.
        return f"{type(inner.optimizer).__name__} keeps master weights outside of its state"
    return ""


def masters_in_adam(inner: Any) -> bool:
    """Return whether FusedAdam holds the master weights, and updates the model's parameters in
    place.

    Then the model's shard is state of its own: with remainders it is the upper half of the master
    weights; with scaled fp16 masters it was rounded from the values that they had before they were
    rounded themselves.
    """
    config = getattr(inner, "config", None)
    return bool(getattr(config, "use_precision_aware_optimizer_no_fp8_or_ds_fp8", False))


def is_hybrid(inner: Any) -> bool:
    """Return whether an inner optimizer is a HybridDeviceOptimizer. Its sub-optimizers update fp32
    copies of its parameters on the host or the device, and it has their state as its own
    (hybrid_optimizer.py). Its ``master_param`` is such a copy, so its four maps hold no other
    state."""
    return hasattr(inner.optimizer, "sub_optimizers")


def updaters(inner: Any) -> list[Any]:
    """Return the optimizers that make the updates of an inner optimizer."""
    return list(inner.optimizer.sub_optimizers) if is_hybrid(inner) else [inner.optimizer]


def _changes_in_place(inner: Any) -> bool:
    return all(map(optimizer_state.changes_in_place, updaters(inner)))


def parameters_of(inner: Any) -> list[Tensor]:
    """Return the parameters that an inner optimizer updates, in the order of its groups."""
    return optimizer_state.parameters_of(inner.optimizer)


# Attributes with the values of Transformer Engine's quantised tensors. Their transposed and
# column-wise copies are derived from these.
_RAW = ("_data", "_scale_inv", "_rowwise_data", "_rowwise_scale_inv")


def raw_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the plain tensors that a quantised tensor wraps, by attribute; empty for any other."""
    if not hasattr(tensor, "_quantizer"):
        return {}
    found = {name: raw for name in _RAW if isinstance(raw := vars(tensor).get(name), Tensor)}
    if not found:
        raise UnsupportedState(f"{type(tensor).__name__} keeps its values in an unknown place")
    return found


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the tensor itself, or the plain tensors that it wraps."""
    return list(raw_tensors(tensor).values()) or [tensor]


def model_parameters(inner: Any) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield each parameter of the model for which an inner optimizer updates another tensor, with
    that tensor and the element of the parameter at which the role's run begins."""
    if is_distributed(inner):
        groups = inner.optimizer.param_groups
        for parameter, (group, place) in inner.model_param_group_index_map.items():
            run = inner._get_model_param_range_map(parameter)["param"]
            yield parameter, groups[group]["params"][place], run.start
        return
    models = getattr(inner, "float16_groups", [])
    masters = getattr(inner, "fp32_from_float16_groups", [])
    for parameters, updated in zip(models, masters, strict=True):
        yield from ((model, main, 0) for model, main in zip(parameters, updated, strict=True))


def state_tensors(inner: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Return every plain tensor that an inner optimizer keeps for a parameter, by name."""
    return {name: owner[key] for name, owner, key in _owners(inner.optimizer, parameter)}


def _owners(adam: Any, parameter: Tensor) -> Iterator[Place]:
    """Yield the place of every plain tensor that an optimizer keeps for a parameter."""
    for name, state, key in optimizer_state.places(adam, parameter):
        kept: Any = state[key]
        raw = raw_tensors(kept)
        for attribute in raw:
            yield f"{name}.{attribute}", vars(kept), attribute
        if not raw:
            yield name, state, key
    # FusedAdam: the factors of moments and masters that are narrower than fp32.
    scales = getattr(adam, "_scales", {}).get(parameter, {})
    for key in sorted(scales):
        yield f"{key}.scale", scales, key


def complete_state(optimizer: Any) -> None:
    """Create the state that the optimizer would create in its first step, with the same values.

    The layout of a slot must be fixed before the first step. Raises UnsupportedState for state that
    is neither tensor nor number, or that depends on the first gradient.
    """
    for inner in inner_optimizers(optimizer):
        for updater in updaters(inner):
            if initial_state.is_plain_adam(updater):
                initial_state.complete_adam(updater)
            elif hasattr(updater, "initialize_state"):
                _complete_fused_adam(updater)
            elif (make := getattr(inner, "init_state_fn", None)) is not None:
                # Megatron's own; for Apex two zeros, as wide as the parameter (fp32).
                make(updater, inner.config)
            else:
                initial_state.complete_by_trial(updater)
        if is_hybrid(inner):
            inner.optimizer._sync_sub_optimizers_state_to_hdo()
        initial_state.refuse_unknown_values(inner.optimizer)


def _complete_fused_adam(adam: Any) -> None:
    """Create state as the ``step`` of FusedAdam does for a new parameter.

    Megatron's ``init_state_fn`` creates other state: it leaves out the second argument, and without
    the precision-aware optimizer it makes no master weights.
    """
    for group in adam.param_groups:
        for parameter in group["params"]:
            if adam.state[parameter]:
                continue
            remainders = getattr(adam, "store_param_remainders", None)
            if remainders is None:  # before Transformer Engine 2.1
                adam.initialize_state(parameter)
            else:
                has_remainder = bool(remainders) and parameter.dtype == torch.bfloat16
                adam.initialize_state(parameter, has_remainder)


class ShardState:
    """The tensors of all inner optimizers, one part for each (:class:`OptimizerState`)."""

    def __init__(self, optimizer: Any) -> None:
        self._inner = inner_optimizers(optimizer)
        # The forward pass and gathers read a shard of the model's parameters at its place.
        self._states = [
            OptimizerState(inner.optimizer, _owners, fixed=masters_in_adam(inner))
            for inner in self._inner
        ]
        distributed_whole = [inner for chain in layer_wise(optimizer) for inner in _chained(chain)]
        self.parts = [
            Part(
                f"shard{index}",
                state.tensors,
                [dist.get_rank()] if inner in distributed_whole else _replicas(inner),
            )
            for index, (inner, state) in enumerate(zip(self._inner, self._states, strict=True))
        ]

    def readopt(self) -> None:
        """Move tensors that a load has replaced back into the packed memory. Their values do not
        change."""
        for index in range(len(self._inner)):
            self._readopt(index)

    def after_update(self, index: int) -> None:
        """Move back the tensors that inner optimizer ``index`` has replaced, unless it is known to
        replace none. Raises UnsupportedState for new state."""
        if not _changes_in_place(self._inner[index]):
            self._readopt(index)

    def _readopt(self, index: int) -> None:
        if is_hybrid(self._inner[index]):  # a load does not update its master weights
            self._inner[index].optimizer._sync_sub_optimizers_state_to_hdo()
        self._states[index].readopt()

    def release(self) -> None:
        """Give parameters of the model memory of their own, as before they were packed."""
        for state in self._states:
            state.release()


def _replicas(inner: Any) -> list[int]:
    """Return the roles whose bytes of this inner optimizer are identical, with this role."""
    if is_distributed(inner):
        if inner.ddp_config.num_distributed_optimizer_instances == 1:
            return [dist.get_rank()]
        group = parallel_state.get_inter_distributed_optimizer_instance_group()
    # The mark on parameters does not serve: the groups may have master weights, which lack it.
    elif any(group.get("is_expert_parallel") for group in inner.optimizer.param_groups):
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return dist.get_process_group_ranks(group)


def statistics_span_the_world(optimizer: Any) -> bool:
    """Return whether found-inf or the gradient norm is summed over all roles before any update.

    Then a collective over all roles lies between a role's gate and its first overwrite, and the
    host waits for it (:mod:`deadpool_megatron.member.protection`): 2+N slots suffice. Otherwise the
    argument by dependencies needs 3+N slots (docs/design.md, "Slots and the gate").
    """
    inner = inner_optimizers(optimizer)
    if not inner or not all(map(is_distributed, inner)):
        return dist.get_world_size() == 1
    groups = [each.get_grad_stats_parallel_group() for each in inner]
    return all(dist.get_world_size(group) == dist.get_world_size() for group in groups)


def _groups(inner: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of an inner optimizer, and those in which the device part of an
    offloaded optimizer counts its steps."""
    on_device = getattr(inner.optimizer, "gpu_optimizer", None)
    return [*inner.optimizer.param_groups, *(on_device.param_groups if on_device else ())]


def param_group_values(optimizer: Any) -> list[list[dict[str, Any]]]:
    """Return the plain values of every parameter group (:func:`group_values`)."""
    return [optimizer_state.group_values(_groups(inner)) for inner in inner_optimizers(optimizer)]


def restore_param_group_values(optimizer: Any, values: list[list[dict[str, Any]]]) -> None:
    """Inverse of :func:`param_group_values`, in place."""
    for inner, groups in zip(inner_optimizers(optimizer), values, strict=True):
        optimizer_state.restore_group_values(_groups(inner), groups)


def group_rates(optimizer: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return every parameter group, in the order of :func:`param_group_values`, with the bounds of
    learning rate and weight decay from the command line."""
    return [
        (group, {name: group[name] for name in _RATES if name in group})
        for inner in inner_optimizers(optimizer)
        for group in _groups(inner)
    ]


def plain_values(inner: Any, parameter: Tensor) -> dict[str, Any]:
    """Return the state of a parameter that is no tensor."""
    return optimizer_state.plain_values(inner.optimizer.state[parameter])


def state_numbers(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the values in the state of parameters that are no tensors, such as counts of steps, by
    place."""
    states = _states_with_numbers(optimizer)
    values = {place: optimizer_state.plain_values(state) for place, state in states}
    return {place: found for place, found in values.items() if found}


def restore_state_numbers(optimizer: Any, kept: Mapping[str, dict[str, Any]]) -> None:
    """Inverse of :func:`state_numbers`."""
    for place, state in _states_with_numbers(optimizer):
        optimizer_state.restore_plain_values(state, kept.get(place, {}))


def _states_with_numbers(optimizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and state of each parameter whose state may hold values that are no tensors."""
    for index, inner in enumerate(inner_optimizers(optimizer)):
        if not _changes_in_place(inner):
            for number, parameter in enumerate(parameters_of(inner)):
                yield f"{index}.{number}", inner.optimizer.state[parameter]


def install_step_hooks(optimizer: Any, calls: StepCalls) -> None:
    """Have an optimizer call ``calls`` around its steps.

    The gate is no pre-hook of torch, since pre-hooks run after found-inf and the gradient norm. The
    norms of an applied update are judged as Megatron has computed them for this role. On a device
    the host waits for them here, as Megatron's train_step() does next.
    """
    original = optimizer.step

    def gated_step() -> Any:
        calls.gate()
        answer = original()
        if isinstance(answer, tuple) and len(answer) == 3 and answer[0]:
            # Since 0.19 some groups of parameters have a norm of their own.
            groups = getattr(optimizer, "grad_norms_by_group", {})
            for norm in (answer[1], *groups.values()):
                if norm is not None:
                    calls.judge(float(norm))
        return answer

    optimizer.step = gated_step
    for index, inner in enumerate(inner_optimizers(optimizer)):
        calls.surround(inner.optimizer, index)
