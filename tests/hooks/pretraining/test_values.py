"""What a step answers and the log sums survive a recovery bit for bit; the scene is put back."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.hooks.pretraining import scene
from deadpool_megatron.hooks.pretraining.iterations import values

CPU = torch.device("cpu")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        ),
    )
)
def test_plain_values_come_back(value: Any) -> None:
    kept = json.loads(json.dumps(values.encode(value)))
    assert repr(values.decode(kept, CPU)) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 7).to(dtype)
    kept = json.loads(json.dumps(values.encode({"lm loss": tensor})))
    found = values.decode(kept, CPU)["lm loss"]
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor)


def test_odd_losses_come_back() -> None:
    found = values.decode(values.encode(torch.tensor([math.inf, -math.inf, -0.0, 1e-45])), CPU)
    assert found.tolist()[:2] == [math.inf, -math.inf]
    assert str(found[2].item()) == "-0.0"
    assert found[3].item() > 0


def test_what_cannot_be_given_back_is_an_error() -> None:
    with pytest.raises(TypeError, match="object"):
        values.encode((1, object()))


def test_a_scene_ends_with_its_block() -> None:
    call = scene.through_scene("train")

    def original(number: int) -> str:
        return f"Megatron {number}"

    assert call(original, 1) == "Megatron 1"
    with scene.acting({"train": lambda f, n: f(n) + "!"}):
        assert call(original, 2) == "Megatron 2!"
        with scene.acting({}):
            assert call(original, 3) == "Megatron 3"
        assert call(original, 4) == "Megatron 4!"
    assert call(original, 5) == "Megatron 5"


def test_a_scene_ends_by_an_exception_as_well() -> None:
    def leave(_original: object) -> None:
        raise ValueError("left")

    call = scene.through_scene("train")
    with pytest.raises(ValueError, match="left"), scene.acting({"train": leave}):
        call(str)
    assert call(str) == ""


def test_a_replaced_attribute_comes_back() -> None:
    module = SimpleNamespace(name=1)
    with scene.replaced(module, "name", 2):
        assert module.name == 2
    assert module.name == 1
