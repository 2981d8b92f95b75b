"""State that only GPUs have: FP8, in histories and in weights.

None of this has run on a GPU: :mod:`tests.megatron.fake_te` stands in for Transformer Engine and
Apex. The classes of Megatron are its own.
"""

import itertools
import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import fp8_utils

from deadpool_megatron.megatron import dimensions, fp8, interrupt_cleanup
from deadpool_megatron.megatron.optimizer import ShardState, complete_state
from deadpool_megatron.state.extras import ExtrasError
from deadpool_megatron.state.optimizer_state import UnsupportedState
from tests.gpu.digests import state_digests
from tests.megatron import fake_te, gpu_rig
from tests.megatron.fake_te import Float8Tensor, Manager, Model
from tests.megatron.gpu_rig import Slot, differences, distributed_inner, plain_inner
from tests.megatron.plain_loop import plain_loop

transformer_engine = fake_te.transformer_engine
_one_rank = gpu_rig.one_rank


TE_DISTRIBUTED = "transformer_engine.pytorch.distributed"


def recipe_loop(recipe: str = "delayed", chunks: int = 1) -> Any:
    kinds: tuple[Any, ...] = (lambda: fake_te.Linear(8), lambda: fake_te.GroupedLinear(8))
    if recipe in ("delayed", "tensorwise"):
        kinds = (*kinds, fake_te.DotProductAttention)
    models = [Model([kind() for kind in kinds], recipe) for _ in range(chunks)]
    weights = [parameter for model in models for parameter in model.parameters()]
    inner = plain_inner(torch.optim.AdamW(weights, lr=0.01))
    loop = plain_loop(models, inner)
    complete_state(loop.optimizer)
    return loop


def registered(manager: type[Manager]) -> list[list[int]]:
    """Return the sizes of the tensors in each register, in its order."""
    return [[t.numel() for t in found] for found in manager.global_scale_buffer.values()]


def train(loop: Any, count: int, seed: int, interrupt: bool = False) -> None:
    """Two micro-batches for each update; every chunk has its own FP8 region, as with stages."""
    for number in range(count):
        generator = torch.Generator().manual_seed(100 * seed + number)
        for module in (m for c in loop.model_chunks for m in c.modules()):
            if hasattr(module, "is_first_microbatch"):
                module.is_first_microbatch = True
        for _ in range(2):
            value = torch.randn(6, 8, generator=generator)
            for chunk in loop.model_chunks:
                with fp8_utils.get_fp8_context(chunk.config):
                    value = chunk(value)
                if interrupt:
                    return
            (value**2).mean().backward()
        for inner in loop.optimizer.chained_optimizers:
            inner.optimizer.step()
            inner.optimizer.zero_grad()


def outcome(manager: type[Manager], loop: Any, count: int) -> tuple[dict[str, str], list[int]]:
    """Train; return the digests of the state, and the sizes of the reductions."""
    manager.reduced.clear()
    train(loop, count, seed=2)
    return state_digests(loop), list(manager.reduced)


@pytest.mark.parametrize(("recipe", "chunks"), [("delayed", 1), ("delayed", 2), ("tensorwise", 2)])
def test_histories_and_scales_are_restored_in_place(transformer_engine, recipe, chunks):
    """Traps, A4. Attention is delayed in its softmax under tensorwise scaling as well."""
    loop = recipe_loop(recipe, chunks)
    shard = ShardState(loop.optimizer)
    first = Slot(loop, shard)
    tensors = [t for _, t in fp8.named_tensors(loop.model_chunks)]
    addresses = [t.data_ptr() for t in tensors]
    assert tensors
    train(loop, 3, seed=1)
    slot, at_capture = Slot(loop, shard), state_digests(loop)
    assert len(slot.extras) < len(first.extras) + 500, "room for them is there from the start"
    after = outcome(transformer_engine, loop, 2)
    train(loop, 1, seed=3, interrupt=True)
    slot.restore(loop, shard)
    assert differences(state_digests(loop), at_capture) == []
    assert outcome(transformer_engine, loop, 2) == after
    now = [t.data_ptr() for _, t in fp8.named_tensors(loop.model_chunks)]
    assert now == addresses
    registered = itertools.chain(*transformer_engine.global_scale_buffer.values())
    assert {t.data_ptr() for t in registered} <= set(addresses)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_newcomer_reduces_the_same_as_survivors(transformer_engine, recipe):
    """It has run no forward pass; in two chunks it would register the second one too late."""
    loop = recipe_loop(recipe, chunks=2)
    shard = ShardState(loop.optimizer)
    train(loop, 2, seed=1)
    slot = Slot(loop, shard)
    after = outcome(transformer_engine, loop, 1)
    order = registered(transformer_engine)
    # Another process: nothing is registered there.
    for name in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        getattr(transformer_engine, name).clear()
    newcomer = recipe_loop(recipe, chunks=2)
    target = ShardState(newcomer.optimizer)
    Slot(newcomer, target)  # as after a build
    slot.restore(newcomer, target)
    assert registered(transformer_engine) == order
    assert outcome(transformer_engine, newcomer, 1) == after


def test_no_module_is_registered_before_the_first_step(transformer_engine):
    """A survivor of an interrupted first iteration, a warmed-up spare, and a newcomer agree."""
    loop = recipe_loop(chunks=2)
    shard = ShardState(loop.optimizer)
    slot = Slot(loop, shard)
    after = outcome(transformer_engine, loop, 1)
    slot.restore(loop, shard)
    assert not any(transformer_engine.global_amax_buffer.values())
    assert outcome(transformer_engine, loop, 1) == after


def test_remains_of_an_interrupt_are_forgotten(transformer_engine):
    loop = recipe_loop()
    fp8.capture(loop)
    train(loop, 1, seed=1)
    recomputing: Any = sys.modules[TE_DISTRIBUTED]
    transformer_engine.AUTOCAST_DEPTH = 2
    transformer_engine.FP8_ENABLED = True
    transformer_engine.IS_FIRST_FP8_MODULE = True
    transformer_engine.fp8_tensors_recompute_buffer = [deque([1, 2]), deque([3])]
    recomputing._FP8_ACTIVATION_RECOMPUTE_PHASE = True
    first = recomputing.activation_recompute_forward._is_first_fp8_module
    first += [True, False]
    linear = loop.model_chunks[0].layers[0]
    workspaces = linear._fp8_workspaces
    assert workspaces
    assert not linear.is_first_microbatch
    fp8.reset_in_flight(loop.model_chunks)
    assert transformer_engine.AUTOCAST_DEPTH == 0
    assert not transformer_engine.FP8_ENABLED
    assert not transformer_engine.IS_FIRST_FP8_MODULE
    assert [list(each) for each in transformer_engine.fp8_tensors_recompute_buffer] == [[], []]
    assert not recomputing._FP8_ACTIVATION_RECOMPUTE_PHASE
    assert first == []
    assert not linear._fp8_workspaces
    assert linear.is_first_microbatch


@pytest.mark.usefixtures("transformer_engine")
def test_other_modules_than_those_captured_are_an_error():
    values = fp8.capture(recipe_loop())
    with pytest.raises(ExtrasError, match="differ"):
        fp8.restore(recipe_loop(chunks=2), values)
    with pytest.raises(ExtrasError, match="differ"):
        fp8.restore(recipe_loop(), {})
    plain = plain_loop([torch.nn.Linear(2, 2)])
    assert fp8.capture(plain) == {}
    fp8.restore(plain, {})
    with pytest.raises(ExtrasError, match="differ"):
        fp8.restore(plain, values)


@pytest.mark.usefixtures("transformer_engine")
def test_state_that_is_kept_elsewhere_is_refused(monkeypatch):
    class Unknown(fake_te.TransformerEngineBaseModule):
        """A module of an unknown kind."""

    loop = recipe_loop()
    loop.model_chunks[0].layers.append(Unknown())
    with pytest.raises(UnsupportedState, match=r"layers\.3: .* Unknown"):
        fp8.capture(loop)
    loop = recipe_loop()
    loop.model_chunks[0].layers[0]._fused_impl = None
    with pytest.raises(UnsupportedState, match=r"layers\.0: fused operations"):
        fp8.capture(loop)
    later: Any = ModuleType("fp8")
    later.FP8GlobalStateManager = SimpleNamespace(quantization_state=None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", later)
    with pytest.raises(UnsupportedState, match="version of Transformer Engine"):
        fp8.capture(recipe_loop())


# Weights in FP8.


def test_weights_in_fp8_are_cast_with_restored_scales_then_gathered_then_finished(
    transformer_engine, monkeypatch
):
    """Through Megatron's own copy of masters into the model."""
    loop = recipe_loop()
    inner = distributed_inner(
        loop.optimizer.chained_optimizers[0].optimizer,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
    )
    inner.buffers, inner.data_parallel_group = [], "data"
    for name in ("model_float16", "model_fp32", "shard_fp32", "shard_fp32_from_float16"):
        setattr(inner, f"{name}_groups", [])
    loop.optimizer.chained_optimizers = [inner]
    (chunk,) = loop.model_chunks
    chunk.bucket_groups = chunk.expert_parallel_bucket_groups = []
    chunk.zero_grad_buffer = lambda: None
    done: list[Any] = []

    def scale() -> float:
        return float(chunk.layers[0].fp8_meta["scaling_fwd"].scale[1])

    monkeypatch.setattr(
        "megatron.core.optimizer.distrib_optimizer.quantize_param_shard",
        lambda *arguments: done.append((arguments[-1], scale())),
    )
    chunk.start_param_sync = lambda force_sync: done.append(("gathered", force_sync))
    monkeypatch.setattr(fp8, "finish_gather", lambda chunks: done.append("finished"))
    shard = ShardState(loop.optimizer)
    fp8.capture(loop)
    train(loop, 2, seed=1)
    slot, wanted = Slot(loop, shard), scale()
    train(loop, 1, seed=2)
    assert scale() != wanted
    transformer_engine.AUTOCAST_DEPTH = 1
    interrupt_cleanup.fp8_state(SimpleNamespace(loop=loop))  # type: ignore[arg-type]
    assert transformer_engine.AUTOCAST_DEPTH == 0
    slot.restore(loop, shard)
    dimensions.rebuild_from_peers(loop)
    assert done == [("data", wanted), ("gathered", True), "finished"]


@pytest.mark.usefixtures("transformer_engine")
def test_frozen_weights_in_fp8_are_refused():
    model = Model([fake_te.Linear(2)], "tensorwise")
    weight = Float8Tensor(torch.ones(4))
    model.layers[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UnsupportedState, match="frozen and in FP8"):
        fp8.capture(plain_loop([model]))
