"""State that only GPUs have: FusedAdam, the precision-aware optimizer, FP8, graph-safe generators.

None of this has run on a GPU. What Transformer Engine and Apex keep is played by
:mod:`tests.hooks.fake_te`; Megatron's own classes are the real ones.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import fp8_utils, parallel_state, tensor_parallel
from megatron.core.enums import Fp8Recipe
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from deadpool_megatron.hooks import extras, fp8_state
from deadpool_megatron.hooks.data import DataHook
from deadpool_megatron.hooks.hashing import state_digests
from deadpool_megatron.hooks.optimizer import (
    ShardState,
    UnsupportedOptimizer,
    complete_state,
    plain_tensors,
    raw_tensors,
    refuse_unknown_state,
)
from deadpool_megatron.state.extras import ExtrasError, decode, encode
from tests.hooks import fake_te
from tests.hooks.fake_te import Float8Tensor, FusedAdam, Manager, Model

transformer_engine = fake_te.transformer_engine
TE_DISTRIBUTED = "transformer_engine.pytorch.distributed"


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: [0])
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **_: None)
    torch.manual_seed(3)


class Loop:
    """The parts of a loop that are captured."""

    def __init__(self, chunks: list[Any], *inner: Any) -> None:
        self.model_chunks = chunks
        self.optimizer = SimpleNamespace(chained_optimizers=list(inner), zero_grad=lambda: None)
        self.scheduler = SimpleNamespace(num_steps=0)
        self.counters = {"iteration": 0}
        self.log_sums: dict[str, float] = {}

    def extra_state(self) -> dict[str, Any]:
        return {}

    def restore_extra_state(self, values: Any) -> None:
        """Nothing."""


class Slot:
    """A generation: bytes of all parts, and extras."""

    def __init__(self, loop: Any, shard: ShardState) -> None:
        self.parts = []
        for part in shard.parts:
            self.parts.append(memoryview(bytearray(part.nbytes)))
            for view, tensor in zip(part.views(self.parts[-1]), part.tensors, strict=True):
                view.copy_(tensor)
        self.extras = encode(extras.capture(loop))

    def restore(self, loop: Any, shard: ShardState) -> None:
        """In the order of a recovery."""
        fp8_state.reset_in_flight(loop.model_chunks)
        for part, buffer in zip(shard.parts, self.parts, strict=True):
            part.load(buffer)
        values = decode(self.extras)
        extras.restore(loop, values)
        extras.restore_last(values)


def plain_inner(optimizer: torch.optim.Optimizer, **more: Any) -> Any:
    return SimpleNamespace(
        optimizer=optimizer, config=SimpleNamespace(), ddp_config=None, grad_scaler=None, **more
    )


def differences(first: dict[str, str], second: dict[str, str]) -> list[str]:
    return [name for name in first.keys() | second.keys() if first.get(name) != second.get(name)]


# The optimizers.


class Sharded(torch.nn.Module):
    """A chunk of two peers: parameters in one buffer, of which this rank updates the second half.

    The gather of the other half is played by noting what would be sent.
    """

    def __init__(self, shapes: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.buffer = torch.randn(2 * sum(shapes)).to(dtype)
        self.shard = self.buffer[sum(shapes) :]
        self.own = list(self.shard.split(shapes))
        self.config = SimpleNamespace(fp8=None)
        self.bucket_groups: list[Any] = []
        self.expert_parallel_bucket_groups: list[Any] = []
        self.sent: list[Tensor] = []

    def start_param_sync(self, force_sync: bool) -> None:
        assert force_sync
        self.sent.append(self.shard.clone())


def distributed_inner(adam: Any, **config: Any) -> Any:
    """Megatron's own class, without what its constructor needs a GPU for."""
    inner = DistributedOptimizer.__new__(DistributedOptimizer)
    inner.optimizer = adam
    inner.config = SimpleNamespace(**config)
    inner.grad_scaler = None
    inner.is_stub_optimizer = False
    inner.ddp_config = SimpleNamespace(
        num_distributed_optimizer_instances=1, use_megatron_fsdp=False
    )
    # Megatron's: one argument too few for the optimizer that it is meant for.
    inner.init_state_fn = lambda opt, config: opt.initialize_state(opt.param_groups[0]["params"][0])
    return inner


def precision_aware(chunk: Sharded, **kinds: Any) -> Any:
    adam = FusedAdam(chunk.own, 0.01, master_weights=True, use_decoupled_grad=True, **kinds)
    return distributed_inner(
        adam,
        use_precision_aware_optimizer=True,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=True,
    )


def update(inner: Any, count: int, seed: int) -> None:
    for number in range(count):
        generator = torch.Generator().manual_seed(100 * seed + number)
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                grad = torch.randn(parameter.shape, generator=generator)
                parameter.grad = grad if parameter.dtype == torch.float32 else None
                parameter.decoupled_grad = grad
        inner.optimizer.step()


NARROW = {
    "remainders": {"store_param_remainders": True},
    "whole-masters": {},
    "fp16-masters": {"master_param_dtype": torch.float16},
    "bf16-moments": {
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.bfloat16,
    },
    "fp16-and-fp8-moments": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
    "all-narrow": {
        "master_param_dtype": torch.float16,
        "exp_avg_dtype": torch.uint8,
        "exp_avg_sq_dtype": torch.uint8,
    },
}


@pytest.mark.parametrize("kinds", NARROW.values(), ids=NARROW)
def test_the_precision_aware_optimizer_goes_on_exactly(kinds: dict[str, Any]) -> None:
    """Traps, A8: the model's shard is state, and is in its place before the forced gather."""
    chunk = Sharded([5, 64, 7])
    inner = precision_aware(chunk, **kinds)
    loop: Any = Loop([chunk], inner)
    refuse_unknown_state(loop.optimizer, chunk.config)
    complete_state(loop.optimizer)
    shard = ShardState(loop.optimizer)
    places = [parameter.data_ptr() for parameter in chunk.own]
    update(inner, 3, seed=1)
    slot, at_capture, model = Slot(loop, shard), state_digests(loop), chunk.shard.clone()
    update(inner, 2, seed=2)
    after = state_digests(loop)
    chunk.buffer.fill_(-1)
    slot.restore(loop, shard)
    DataHook(loop).rebuild_from_peers()
    assert torch.equal(chunk.sent[-1], model)
    assert differences(state_digests(loop), at_capture) == []
    update(inner, 2, seed=2)
    assert differences(state_digests(loop), after) == []
    assert [parameter.data_ptr() for parameter in chunk.own] == places


@pytest.mark.parametrize("kinds", NARROW.values(), ids=NARROW)
def test_state_made_at_the_start_is_what_a_first_step_makes(kinds: dict[str, Any]) -> None:
    results = []
    for eager in (True, False):
        torch.manual_seed(3)
        chunk = Sharded([5, 64, 7])
        inner = precision_aware(chunk, **kinds)
        loop: Any = Loop([chunk], inner)
        if eager:
            complete_state(loop.optimizer)
            ShardState(loop.optimizer)
        update(inner, 2, seed=1)
        results.append((state_digests(loop), chunk.shard))
    assert torch.equal(results[0][1], results[1][1])
    assert differences(results[0][0], results[1][0]) == []


def test_a_parameter_that_fills_its_buffer_stays_there() -> None:
    """Packing would take it from under the model."""
    chunk = Sharded([64])
    chunk.own = [chunk.buffer[:]]
    loop: Any = Loop([chunk], inner := precision_aware(chunk, store_param_remainders=True))
    complete_state(loop.optimizer)
    ShardState(loop.optimizer)
    update(inner, 1, seed=1)
    assert chunk.own[0].data_ptr() == chunk.buffer.data_ptr()


def test_masters_that_megatron_keeps_are_packed_with_narrow_moments() -> None:
    """With tensorwise, blockwise or MXFP8 scaling and fp32 masters: the ordinary way."""
    masters = [torch.randn(5), torch.randn(7)]
    adam = FusedAdam(masters, 0.01, exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.uint8)
    inner = distributed_inner(
        adam,
        use_precision_aware_optimizer=True,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=False,
    )
    loop: Any = Loop([], inner)
    complete_state(loop.optimizer)
    (part,) = (shard := ShardState(loop.optimizer)).parts
    assert {tensor.dtype for tensor in part.tensors} == {
        torch.float32,  # masters and factors
        torch.bfloat16,
        torch.uint8,
    }
    assert len(part.tensors) == 3
    update(inner, 1, seed=1)
    slot, at_capture = Slot(loop, shard), state_digests(loop)
    update(inner, 1, seed=2)
    slot.restore(loop, shard)
    assert differences(state_digests(loop), at_capture) == []


def test_a_load_puts_new_tensors_everywhere_and_the_parts_follow() -> None:
    chunk = Sharded([5, 7])
    kinds = NARROW["all-narrow"]
    loop: Any = Loop([chunk], inner := precision_aware(chunk, **kinds))
    complete_state(loop.optimizer)
    shard = ShardState(loop.optimizer)
    update(inner, 2, seed=1)
    other = Sharded([5, 7])
    source = precision_aware(other, **kinds)
    update(source, 3, seed=4)
    states = {
        own: {name: source.optimizer._get(theirs, name) for name in source.optimizer.dtypes}
        for own, theirs in zip(chunk.own, other.own, strict=True)
    }
    chunk.shard.copy_(other.shard)
    inner.optimizer.load_values(states)
    loaded = state_digests(loop)
    shard.readopt()
    assert differences(state_digests(loop), loaded) == []
    slot = Slot(loop, shard)
    update(inner, 1, seed=5)
    slot.restore(loop, shard)
    assert differences(state_digests(loop), loaded) == []


def test_a_load_that_leaves_state_out_is_noticed() -> None:
    chunk = Sharded([5])
    loop: Any = Loop([chunk], inner := precision_aware(chunk))
    complete_state(loop.optimizer)
    shard = ShardState(loop.optimizer)
    del inner.optimizer.state[chunk.own[0]]["exp_avg"]
    with pytest.raises(KeyError, match="exp_avg"):
        shard.readopt()


@pytest.mark.parametrize("capturable", [False, True])
def test_the_count_of_steps_in_the_groups_is_exact(capturable: bool) -> None:
    """It begins with the first step: a generation from before it has none."""
    weight = torch.nn.Parameter(torch.ones(3))
    inner = plain_inner(FusedAdam([weight], 0.5, capturable=capturable))
    loop: Any = Loop([], inner)
    complete_state(loop.optimizer)
    shard = ShardState(loop.optimizer)
    (group,) = inner.optimizer.param_groups
    first, learning_rate = Slot(loop, shard), group["lr"]
    update(inner, 1, seed=1)
    group["note"] = 4
    assert int(group["step"]) == 1
    first.restore(loop, shard)
    assert group.keys() == {"params", "lr"}
    assert not capturable or group["lr"] is learning_rate
    update(inner, 2, seed=1)
    if capturable:
        group["lr"].mul_(0.1)
    second, counted = Slot(loop, shard), group["step"]
    kept, shown = float(group["lr"]), state_digests(loop)
    update(inner, 1, seed=2)
    if capturable:
        group["lr"].mul_(0.1)
    assert differences(state_digests(loop), shown)
    second.restore(loop, shard)
    assert int(group["step"]) == 2
    assert float(group["lr"]) == kept
    assert isinstance(group["step"], Tensor) == capturable
    assert not capturable or group["step"] is counted
    assert differences(state_digests(loop), shown) == []
    # A process that has made no step yet.
    newcomer = plain_inner(FusedAdam([torch.nn.Parameter(torch.ones(3))], 0.5, capturable=False))
    target: Any = Loop([], newcomer)
    complete_state(target.optimizer)
    values = decode(second.extras)
    extras.restore(target, values)
    assert int(newcomer.optimizer.param_groups[0]["step"]) == 2


class ApexAdam(torch.optim.SGD):
    """No ``initialize_state``; Megatron's function makes what its first step would make."""

    master_weights = False


def megatrons_init_state(opt: Any, config: Any = None) -> None:
    """What ``init_state_fn`` of core/optimizer/__init__.py does for this configuration."""
    assert not hasattr(config, "use_precision_aware_optimizer")
    for group in opt.param_groups:
        for parameter in group["params"]:
            if not opt.state[parameter]:
                opt.state[parameter]["exp_avg"] = torch.zeros_like(parameter.data)
                opt.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter.data)


def test_apex_state_is_made_by_megatron_and_packed() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    inner = plain_inner(ApexAdam([weight], 0.5), init_state_fn=megatrons_init_state)
    loop: Any = Loop([], inner)
    refuse_unknown_state(loop.optimizer, SimpleNamespace())
    complete_state(loop.optimizer)
    (part,) = ShardState(loop.optimizer).parts
    (arena,) = part.tensors
    assert arena.sum() == 3
    inner.optimizer.master_weights = True
    with pytest.raises(UnsupportedOptimizer, match="ApexAdam keeps master weights outside"):
        refuse_unknown_state(loop.optimizer, SimpleNamespace())


# FP8.


def recipe_loop(recipe: str = "delayed", chunks: int = 1) -> Any:
    kinds: tuple[Any, ...] = (lambda: fake_te.Linear(8), lambda: fake_te.GroupedLinear(8))
    if recipe in ("delayed", "tensorwise"):
        kinds = (*kinds, fake_te.DotProductAttention)
    models = [Model([kind() for kind in kinds], recipe) for _ in range(chunks)]
    weights = [parameter for model in models for parameter in model.parameters()]
    inner = plain_inner(torch.optim.AdamW(weights, lr=0.01))
    loop = Loop(models, inner)
    complete_state(loop.optimizer)
    return loop


def registered(manager: type[Manager]) -> list[list[int]]:
    """What each register holds, in its order."""
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


@pytest.mark.parametrize(("recipe", "chunks"), [("delayed", 1), ("delayed", 2), ("tensorwise", 2)])
def test_histories_and_scales_come_back_in_place(
    transformer_engine: type[Manager], recipe: str, chunks: int
) -> None:
    """Traps, A4. Attention is delayed in its softmax under tensorwise scaling as well."""
    loop = recipe_loop(recipe, chunks)
    shard = ShardState(loop.optimizer)
    first = Slot(loop, shard)
    tensors = [t for _, t in fp8_state.named_tensors(loop.model_chunks)]
    addresses = [t.data_ptr() for t in tensors]
    assert tensors
    train(loop, 3, seed=1)
    slot, at_capture = Slot(loop, shard), state_digests(loop)
    assert len(slot.extras) < len(first.extras) + 500, "room for them is there from the start"
    transformer_engine.reduced.clear()
    train(loop, 2, seed=2)
    after, reduced = state_digests(loop), list(transformer_engine.reduced)
    train(loop, 1, seed=3, interrupt=True)
    slot.restore(loop, shard)
    assert differences(state_digests(loop), at_capture) == []
    transformer_engine.reduced.clear()
    train(loop, 2, seed=2)
    assert differences(state_digests(loop), after) == []
    assert transformer_engine.reduced == reduced
    now = [t.data_ptr() for _, t in fp8_state.named_tensors(loop.model_chunks)]
    assert now == addresses
    registered = itertools.chain(*transformer_engine.global_scale_buffer.values())
    assert {t.data_ptr() for t in registered} <= set(addresses)


@pytest.mark.usefixtures("transformer_engine")
def test_all_values_are_captured_by_one_copy() -> None:
    loop = recipe_loop()
    values = fp8_state.capture(loop)
    assert values.keys() == {"fp8.layout", "fp8.registered", "fp8.values.float32"}
    total = sum(t.numel() for _, t in fp8_state.named_tensors(loop.model_chunks))
    # Scale and history: one product, two experts, attention's three.
    assert total == (1 + fake_te.HISTORY) * (1 + 2 + 3) * (3 + 2)
    assert values["fp8.values.float32"].shape == (total,)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_a_newcomer_reduces_what_survivors_reduce(
    transformer_engine: type[Manager], recipe: str
) -> None:
    """It has run no forward pass; in two chunks it would register the second one too late."""
    loop = recipe_loop(recipe, chunks=2)
    shard = ShardState(loop.optimizer)
    train(loop, 2, seed=1)
    slot = Slot(loop, shard)
    transformer_engine.reduced.clear()
    train(loop, 1, seed=2)
    after, reduced = state_digests(loop), list(transformer_engine.reduced)
    order = registered(transformer_engine)
    # Another process: nothing is registered there.
    for name in ("global_amax_buffer", "global_amax_history_buffer", "global_scale_buffer"):
        getattr(transformer_engine, name).clear()
    newcomer = recipe_loop(recipe, chunks=2)
    target = ShardState(newcomer.optimizer)
    Slot(newcomer, target)  # what a build captures
    slot.restore(newcomer, target)
    assert registered(transformer_engine) == order
    transformer_engine.reduced.clear()
    train(newcomer, 1, seed=2)
    assert differences(state_digests(newcomer), after) == []
    assert transformer_engine.reduced == reduced


def test_before_the_first_step_nothing_is_registered(transformer_engine: type[Manager]) -> None:
    """A survivor of an interrupted first iteration, a warmed-up spare, and a newcomer agree."""
    loop = recipe_loop(chunks=2)
    shard = ShardState(loop.optimizer)
    slot = Slot(loop, shard)
    train(loop, 1, seed=1)
    after, reduced = state_digests(loop), list(transformer_engine.reduced)
    slot.restore(loop, shard)
    assert not any(transformer_engine.global_amax_buffer.values())
    transformer_engine.reduced.clear()
    train(loop, 1, seed=1)
    assert differences(state_digests(loop), after) == []
    assert transformer_engine.reduced == reduced


def test_the_model_of_another_role_is_not_reduced_any_more(
    transformer_engine: type[Manager],
) -> None:
    """A process that is built for another role still has the first one's registrations."""
    old = recipe_loop(chunks=2)
    fp8_state.capture(old)
    train(old, 1, seed=1)
    transformer_engine.reduced.clear()
    loop = recipe_loop()
    fp8_state.capture(loop)
    assert transformer_engine.reduced == []
    fp8_state.reset_in_flight(loop.model_chunks)
    assert not any(transformer_engine.global_amax_buffer.values())
    train(loop, 1, seed=1)
    kept = registered(transformer_engine)
    fp8_state.reset_in_flight(loop.model_chunks)
    assert registered(transformer_engine) == kept == [[9, 6, 3], [6, 4, 2]], "of its own, nothing"


def test_what_an_interrupt_leaves_behind_is_forgotten(transformer_engine: type[Manager]) -> None:
    loop = recipe_loop()
    fp8_state.capture(loop)
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
    assert linear._fp8_workspaces
    assert not linear.is_first_microbatch
    fp8_state.reset_in_flight(loop.model_chunks)
    assert transformer_engine.AUTOCAST_DEPTH == 0
    assert not transformer_engine.FP8_ENABLED
    assert not transformer_engine.IS_FIRST_FP8_MODULE
    assert [list(one) for one in transformer_engine.fp8_tensors_recompute_buffer] == [[], []]
    assert not recomputing._FP8_ACTIVATION_RECOMPUTE_PHASE
    assert first == []
    assert not linear._fp8_workspaces
    assert linear.is_first_microbatch


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8"])
def test_recipes_without_a_history_keep_nothing(
    transformer_engine: type[Manager], recipe: str
) -> None:
    loop = recipe_loop(recipe)
    shard = ShardState(loop.optimizer)
    train(loop, 2, seed=1)
    assert not [name for name in fp8_state.capture(loop) if name.startswith("fp8.values")]
    slot = Slot(loop, shard)
    train(loop, 1, seed=2)
    after = state_digests(loop)
    slot.restore(loop, shard)
    assert not loop.model_chunks[0].layers[0]._fp8_workspaces, "copies of other weights"
    train(loop, 1, seed=2)
    assert differences(state_digests(loop), after) == []
    assert transformer_engine.reduced == []


@pytest.mark.usefixtures("transformer_engine")
def test_other_modules_than_those_captured_are_an_error() -> None:
    values = fp8_state.capture(recipe_loop())
    with pytest.raises(ExtrasError, match="differ"):
        fp8_state.restore(recipe_loop(chunks=2), values)
    with pytest.raises(ExtrasError, match="differ"):
        fp8_state.restore(recipe_loop(), {})
    plain: Any = Loop([torch.nn.Linear(2, 2)])
    assert fp8_state.capture(plain) == {}
    fp8_state.restore(plain, {})
    with pytest.raises(ExtrasError, match="differ"):
        fp8_state.restore(plain, values)


@pytest.mark.usefixtures("transformer_engine")
def test_training_in_bf16_with_the_same_modules_keeps_nothing() -> None:
    loop = recipe_loop()
    loop.model_chunks[0].config.fp8 = None
    assert fp8_state.capture(loop) == {}
    assert not loop.model_chunks[0].layers[0].fp8_initialized
    fp8_state.reset_in_flight(loop.model_chunks)
    fp8_state.restore(loop, {})


@pytest.mark.usefixtures("transformer_engine")
def test_state_that_is_kept_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unheard(fake_te.TransformerEngineBaseModule):
        """Of a kind that nobody has looked at."""

    loop = recipe_loop()
    loop.model_chunks[0].layers.append(Unheard())
    with pytest.raises(UnsupportedOptimizer, match=r"layers\.3: .* Unheard"):
        fp8_state.capture(loop)
    loop = recipe_loop()
    loop.model_chunks[0].layers[0]._fused_impl = None
    with pytest.raises(UnsupportedOptimizer, match=r"layers\.0: fused operations"):
        fp8_state.capture(loop)
    later: Any = ModuleType("fp8")
    later.FP8GlobalStateManager = SimpleNamespace(quantization_state=None)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.fp8", later)
    with pytest.raises(UnsupportedOptimizer, match="version of Transformer Engine"):
        fp8_state.capture(recipe_loop())


# Weights in FP8.


@pytest.mark.usefixtures("transformer_engine")
def test_weights_in_fp8_are_read_as_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    weight = torch.nn.Parameter(Float8Tensor(torch.ones(4)))
    weight.tensor_model_parallel = True
    assert list(raw_tensors(weight)) == ["_data", "_scale_inv"]
    assert raw_tensors(torch.ones(2)) == {}
    assert plain_tensors(weight) == [weight._data, weight._scale_inv]
    model = Model([fake_te.Linear(2)], "tensorwise")
    model.layers[0].weight = weight
    loop: Any = Loop([model], plain_inner(FusedAdam([torch.ones(4)], 0.1)))
    fp8_state.capture(loop)
    before = state_digests(loop)
    assert {f"parameter.0.layers.0.weight.{raw}" for raw in ("_data", "_scale_inv")} < set(before)
    weight._scale_inv.mul_(2)
    assert differences(before, state_digests(loop)) == ["parameter.0.layers.0.weight._scale_inv"]
    finished: list[Any] = []
    monkeypatch.setattr(fp8_utils, "post_all_gather_processing", finished.append)
    fp8_state.finish_gather(loop.model_chunks)
    assert finished == [[weight]]


def test_weights_in_fp8_are_cast_with_restored_scales_then_gathered_then_finished(
    transformer_engine: type[Manager], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    monkeypatch.setattr(fp8_state, "finish_gather", lambda chunks: done.append("finished"))
    shard, hook = ShardState(loop.optimizer), DataHook(loop)
    fp8_state.capture(loop)
    train(loop, 2, seed=1)
    slot, wanted = Slot(loop, shard), scale()
    train(loop, 1, seed=2)
    assert scale() != wanted
    transformer_engine.AUTOCAST_DEPTH = 1
    hook.reset_in_flight()
    assert transformer_engine.AUTOCAST_DEPTH == 0
    slot.restore(loop, shard)
    hook.rebuild_from_peers()
    assert done == [("data", wanted), ("gathered", True), "finished"]


def test_peers_compare_the_bytes_of_weights_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(Float8Tensor(torch.ones(4)))
    model = torch.nn.Module()
    model.weight = weight
    seen: list[Any] = []
    monkeypatch.setattr(
        "deadpool_megatron.hooks.data.compare_with_peers",
        lambda tensors, group, what: seen.append((tensors, group)),
    )
    monkeypatch.setattr(DataHook, "groups", lambda self: {"data": 1, "expert-data": 2})
    loop: Any = Loop([model])
    DataHook(loop).verify()
    weight.allreduce = False
    DataHook(loop).verify()
    raw = [weight._data, weight._scale_inv]
    assert seen == [(raw, 1), ([], 1), (raw, 2)]


@pytest.mark.usefixtures("transformer_engine")
def test_frozen_weights_in_fp8_are_refused() -> None:
    model = Model([fake_te.Linear(2)], "tensorwise")
    weight = Float8Tensor(torch.ones(4))
    model.layers[0].weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(UnsupportedOptimizer, match="frozen and in FP8"):
        fp8_state.capture(Loop([model]))  # type: ignore[arg-type]


# Refusals.


@pytest.mark.parametrize("recipe", [*Fp8Recipe, "delayed"])
def test_fp8_recipes_are_taken_but_the_custom_one(recipe: Any) -> None:
    inner = plain_inner(FusedAdam([torch.ones(1)], 0.1))
    optimizer = SimpleNamespace(chained_optimizers=[inner])
    config = SimpleNamespace(fp8="e4m3", fp8_recipe=recipe, fp8_param=False)
    if recipe != "custom":
        refuse_unknown_state(optimizer, config)
        return
    with pytest.raises(UnsupportedOptimizer, match="fp8 recipe custom"):
        refuse_unknown_state(optimizer, config)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_weights_in_fp8_with_masters_of_megatron_are_taken(recipe: str) -> None:
    inner = distributed_inner(FusedAdam([torch.ones(1)], 0.1))
    optimizer = SimpleNamespace(chained_optimizers=[inner])
    refuse_unknown_state(optimizer, SimpleNamespace(fp8="e4m3", fp8_recipe=recipe, fp8_param=True))


AWARE = {
    "use_precision_aware_optimizer": True,
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8": True,
}


@pytest.mark.parametrize(
    ("config", "more", "words"),
    [
        ({"fp4": "e2m1"}, {}, "fp4"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True}, {}, "MXFP8"),
        ({"fp8": "e4m3", "fp8_param": True}, {"plain": True}, "distributed optimizer only"),
        ({"fp8": "e4m3", "fp8_param": True}, {"config": AWARE}, "casts itself"),
        ({"fp8": "e4m3", "fp8_param": True, "qk_clip": True}, {}, "QK-clip"),
        ({"fp8": "e4m3", "fp8_param": True}, {"grad_scaler": object()}, "skipped update"),
        ({"cuda_graph_impl": "local"}, {}, "CUDA graphs"),
        ({"enable_cuda_graph": True}, {}, "CUDA graphs"),
        ({"external_cuda_graph": True}, {}, "CUDA graphs"),
    ],
)
def test_what_cannot_be_done_right_is_refused(
    config: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    adam = FusedAdam([torch.ones(1)], 0.1)
    inner = plain_inner(adam) if more.get("plain") else distributed_inner(adam)
    inner.config = SimpleNamespace(**more.get("config", {}))
    inner.grad_scaler = more.get("grad_scaler")
    optimizer = SimpleNamespace(chained_optimizers=[inner])
    with pytest.raises(UnsupportedOptimizer, match=words):
        refuse_unknown_state(optimizer, SimpleNamespace(**config))
    refuse_unknown_state(
        SimpleNamespace(chained_optimizers=[distributed_inner(adam)]),
        SimpleNamespace(cuda_graph_impl="none", enable_cuda_graph=False, fp8=None, fp8_param=True),
    )


@pytest.mark.parametrize("name", ["LayerWiseDistributedOptimizer", "TensorParallelMuon"])
def test_optimizers_without_an_inventory_stay_refused(name: str) -> None:
    kind = type(name, (torch.optim.SGD,), {})
    inner = plain_inner(kind([torch.nn.Parameter(torch.ones(1))], 0.1))
    with pytest.raises(UnsupportedOptimizer, match=name):
        refuse_unknown_state(SimpleNamespace(chained_optimizers=[inner]), SimpleNamespace())


def test_quantised_tensors_of_an_unknown_make_are_refused() -> None:
    tensor: Any = torch.ones(2)
    tensor._quantizer = None
    with pytest.raises(UnsupportedOptimizer, match="unknown place"):
        raw_tensors(tensor)


# Random states.


def test_a_tracker_of_generators_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's, and Megatron's own for CUDA graphs: forks refer to the objects."""

    class Tracker:
        def __init__(self) -> None:
            self.states_: dict[str, Any] = {
                name: torch.Generator().manual_seed(seed) for seed, name in enumerate("ab")
            }

        def get_states(self) -> dict[str, Any]:
            return dict(self.states_)

        def set_states(self, states: dict[str, Any]) -> None:
            self.states_ = states

    tracker = Tracker()
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: tracker)
    generators = dict(tracker.states_)

    def draw() -> list[float]:
        return [torch.rand(1, generator=g).item() for g in tracker.states_.values()]

    loop: Any = Loop([])
    draw()
    slot, shown = Slot(loop, ShardState(loop.optimizer)), state_digests(loop)
    first = draw()
    assert differences(state_digests(loop), shown) != []
    slot.restore(loop, ShardState(loop.optimizer))
    assert differences(state_digests(loop), shown) == []
    assert draw() == first
    assert tracker.states_ == generators, "the same objects"
