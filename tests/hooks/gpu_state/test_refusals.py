"""State that only GPUs have: what cannot be protected is refused with a reason."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.enums import Fp8Recipe

from deadpool_megatron.hooks.training_state.optimizer import (
    UnsupportedOptimizer,
    raw_tensors,
    refuse_unknown_state,
)
from tests.hooks.gpu_state import gpu_rig
from tests.hooks.gpu_state.fake_te import FusedAdam
from tests.hooks.gpu_state.gpu_rig import distributed_inner, plain_inner

_one_rank = gpu_rig.one_rank


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
        ({"qk_clip": True}, {}, "QK-clip"),
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


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("LayerWiseDistributedOptimizer", {}, "LayerWiseDistributedOptimizer"),
        ("TensorParallelMuon", {}, "TensorParallelMuon"),
        ("HybridDeviceOptimizer", {}, "HybridDeviceOptimizer"),
        ("SGD", {"use_precision_aware_optimizer": True}, "precision-aware use of SGD"),
    ],
)
def test_optimizers_without_an_inventory_stay_refused(
    name: str, config: dict[str, Any], words: str
) -> None:
    kind = type(name, (torch.optim.SGD,), {})
    inner = plain_inner(kind([torch.nn.Parameter(torch.ones(1))], 0.1))
    inner.config = SimpleNamespace(**config)
    with pytest.raises(UnsupportedOptimizer, match=words):
        refuse_unknown_state(SimpleNamespace(chained_optimizers=[inner]), SimpleNamespace())


def test_quantised_tensors_of_an_unknown_make_are_refused() -> None:
    tensor: Any = torch.ones(2)
    tensor._quantizer = None
    with pytest.raises(UnsupportedOptimizer, match="unknown place"):
        raw_tensors(tensor)
