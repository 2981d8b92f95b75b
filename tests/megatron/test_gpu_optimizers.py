"""State that only GPUs have: FusedAdam, the precision-aware optimizer, Apex, graph-safe generators;
and refusals.

None of this has run on a GPU: :mod:`tests.megatron.fake_te` stands in for Transformer Engine and
Apex. The classes of Megatron are its own.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.enums import Fp8Recipe
from torch import Tensor

from deadpool_megatron.megatron import dimensions, loop_extras as extras
from deadpool_megatron.megatron.optimizer import (
    ShardState,
    complete_state,
    raw_tensors,
    refuse_unknown_state,
)
from deadpool_megatron.state.extras import decode
from deadpool_megatron.state.optimizer_state import UnsupportedState
from deadpool_megatron.support import flags
from tests.gpu.digests import state_digests
from tests.megatron import gpu_rig
from tests.megatron.fake_te import FusedAdam
from tests.megatron.gpu_rig import (
    Slot,
    begun_and_continued,
    differences,
    distributed_inner,
    plain_inner,
    update,
)
from tests.megatron.plain_loop import plain_loop

_one_rank = gpu_rig.one_rank


class Sharded(torch.nn.Module):
    """A chunk of two peers: parameters in one buffer, of which this rank updates the second half.

    A gather of the other half only notes the shard that would be sent.
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


def precision_aware(chunk: Sharded, **kinds: Any) -> Any:
    adam = FusedAdam(chunk.own, 0.01, master_weights=True, use_decoupled_grad=True, **kinds)
    return distributed_inner(
        adam,
        use_precision_aware_optimizer=True,
        use_precision_aware_optimizer_no_fp8_or_ds_fp8=True,
    )


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
def test_precision_aware_optimizer_begins_and_continues_exactly(kinds):
    """Traps, A8: the model's shard is state, and is in its place before the forced gather."""

    def make() -> Any:
        torch.manual_seed(3)
        chunk = Sharded([5, 64, 7])
        loop = plain_loop([chunk], precision_aware(chunk, **kinds))
        refuse_unknown_state(loop.optimizer, chunk.config)
        return loop

    stock, loop, shard = begun_and_continued(make)
    (chunk,), (other,) = loop.model_chunks, stock.model_chunks
    slot, places = Slot(loop, shard), [parameter.data_ptr() for parameter in chunk.own]
    chunk.buffer.fill_(-1)
    slot.restore(loop, shard)
    dimensions.rebuild_from_peers(loop)
    assert torch.equal(chunk.sent[-1], other.shard)
    assert differences(state_digests(loop), state_digests(stock)) == []
    assert [parameter.data_ptr() for parameter in chunk.own] == places


def test_load_puts_new_tensors_everywhere_and_the_parts_follow():
    chunk = Sharded([5, 7])
    kinds = NARROW["all-narrow"]
    loop = plain_loop([chunk], inner := precision_aware(chunk, **kinds))
    complete_state(loop.optimizer)
    shard = ShardState(loop.optimizer)
    update(inner, range(2))
    other = Sharded([5, 7])
    source = precision_aware(other, **kinds)
    update(source, range(4, 7))
    states = {
        own: {name: source.optimizer._get(saved, name) for name in source.optimizer.dtypes}
        for own, saved in zip(chunk.own, other.own, strict=True)
    }
    chunk.shard.copy_(other.shard)
    inner.optimizer.load_values(states)
    loaded = state_digests(loop)
    shard.readopt()
    assert differences(state_digests(loop), loaded) == []
    slot = Slot(loop, shard)
    update(inner, [7])
    slot.restore(loop, shard)
    assert differences(state_digests(loop), loaded) == []


def test_load_that_leaves_state_out_is_noticed():
    chunk = Sharded([5])
    loop = plain_loop([chunk], inner := precision_aware(chunk))
    complete_state(loop.optimizer)
    shard = ShardState(loop.optimizer)
    del inner.optimizer.state[chunk.own[0]]["exp_avg"]
    with pytest.raises(KeyError, match="exp_avg"):
        shard.readopt()


@pytest.mark.parametrize("capturable", [False, True])
def test_count_of_steps_in_the_groups_is_exact(capturable):
    """It begins with the first step: a generation from before it has none."""
    weight = torch.nn.Parameter(torch.ones(3))
    inner = plain_inner(FusedAdam([weight], 0.5, capturable=capturable))
    loop = plain_loop([], inner)
    complete_state(loop.optimizer)
    shard = ShardState(loop.optimizer)
    (group,) = inner.optimizer.param_groups
    first, learning_rate = Slot(loop, shard), group["lr"]
    update(inner, [0])
    group["note"] = 4
    assert int(group["step"]) == 1
    first.restore(loop, shard)
    assert group.keys() == {"params", "lr"}
    assert not capturable or group["lr"] is learning_rate
    update(inner, range(2))
    if capturable:
        group["lr"].mul_(0.1)
    second, counted = Slot(loop, shard), group["step"]
    kept, shown = float(group["lr"]), state_digests(loop)
    update(inner, [2])
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
    target = plain_loop([], newcomer)
    complete_state(target.optimizer)
    values = decode(second.extras)
    extras.restore(target, values)
    assert int(newcomer.optimizer.param_groups[0]["step"]) == 2


# Random states.


def test_tracker_of_generators_keeps_them(monkeypatch):
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

    loop = plain_loop([])
    draw()
    slot, shown = Slot(loop, ShardState(loop.optimizer)), state_digests(loop)
    first = draw()
    assert differences(state_digests(loop), shown) != []
    slot.restore(loop, ShardState(loop.optimizer))
    assert differences(state_digests(loop), shown) == []
    assert draw() == first
    assert tracker.states_ == generators, "the same objects"


def refusal(inner: Any, **config: Any) -> str:
    chained = SimpleNamespace(chained_optimizers=[inner])
    try:
        refuse_unknown_state(chained, SimpleNamespace(**config))
    except UnsupportedState as error:
        return str(error)
    return ""


def fused() -> Any:
    return distributed_inner(FusedAdam([torch.ones(1)], 0.1))


@pytest.mark.parametrize("recipe", [*Fp8Recipe, "delayed"])
def test_fp8_recipes_but_the_custom_one_are_accepted(recipe):
    found = refusal(fused(), fp8="e4m3", fp8_recipe=recipe, fp8_param=False)
    assert found.startswith("--fp8-recipe custom") == (recipe == "custom")


def meeting(condition: str) -> dict[str, Any]:
    """Arguments that meet a condition of a row."""
    found: dict[str, Any] = {}
    for term in condition.split(" and "):
        name, _, rest = term.partition(" ")
        test, _, values = rest.partition(" ")
        number = int(values) + 1 if test == "above" else 0
        found[name] = number or (values.split()[0] if test in ("is", "has") else True)
    return found


@pytest.mark.parametrize("row", [*flags.ACCEPTED, *flags.READ], ids=lambda row: row.name)
def test_model_with_an_accepted_flag_is_built(row):
    """A model with a flag that support accepts is refused nowhere later."""
    for condition in row.when or [flag[2:].replace("-", "_") for flag in row.flags]:
        config = meeting(condition)
        assert row.applies(SimpleNamespace(**config)) or "is-not" in condition
        assert refusal(fused(), **config) == ""


AWARE = {
    "use_precision_aware_optimizer": True,
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8": True,
}
FP8 = {"fp8": "e4m3", "fp8_param": True}


@pytest.mark.parametrize(
    ("config", "optimizer", "reason"),
    [
        ({"fp4": "e2m1"}, {}, "fp4"),
        ({**FP8, "fp8_recipe": "mxfp8"}, {}, "MXFP8"),
        (FP8, {"plain": True}, "distributed optimizer only"),
        (FP8, {"config": AWARE}, "casts itself"),
        ({"qk_clip": True}, {}, "--qk-clip"),
        (FP8, {"grad_scaler": object()}, "skipped update"),
        ({"cuda_graph_impl": "local"}, {}, "--enable-cuda-graph"),
        ({"enable_cuda_graph": True}, {}, "--enable-cuda-graph"),
        *(({**FP8, "fp8_recipe": name}, {}, "") for name in ("delayed", "tensorwise", "blockwise")),
        ({"cuda_graph_impl": "none", "enable_cuda_graph": False, **FP8, "fp8": None}, {}, ""),
    ],
)
def test_unsupported_training_is_refused(config, optimizer, reason):
    inner = fused()
    if optimizer.get("plain"):
        inner = plain_inner(inner.optimizer)
    inner.config = SimpleNamespace(**optimizer.get("config", {}))
    inner.grad_scaler = optimizer.get("grad_scaler")
    found = refusal(inner, **config)
    assert (reason in found, bool(found)) == (True, bool(reason))


def test_optimizers_with_state_in_unknown_places_are_refused():
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    # As the layer-wise optimizer has them in fp32.
    assert "--bf16" in refusal(sgd)
    inner = plain_inner(sgd)
    inner.config = SimpleNamespace(use_precision_aware_optimizer=True)
    assert "precision-aware use of SGD" in refusal(inner)
    tensor: Any = torch.ones(2)
    tensor._quantizer = None
    with pytest.raises(UnsupportedState, match="unknown place"):
        raw_tensors(tensor)
