"""The newest iteration is replayed exactly, also behind an update that was skipped."""

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
from deadpool_megatron.hooks.pretraining.iteration import LOSSES, SKIPPED, Newest, decode, encode

CPU = torch.device("cpu")


def trained(skipped: int, gathers_ahead: bool) -> Newest:
    """An iteration that was trained, as another process gets it."""
    newest = Newest(10.0)
    newest.begin(SimpleNamespace(consumed_train_samples=16, skipped_train_samples=1), gathers_ahead)
    losses = {"lm loss": torch.tensor(0.1) / 3}
    newest.finish((losses, skipped, False, False, 0, 0.7, None, 0), {"lm loss": torch.ones(1)})
    newest.operations = 25.0
    other = Newest(0.0)
    other.restore(json.loads(json.dumps(newest.to_dict())))
    return other


def test_the_answer_comes_back_exactly() -> None:
    newest = trained(skipped=0, gathers_ahead=False)
    answer = newest.replay(CPU)
    assert torch.equal(answer[LOSSES]["lm loss"], torch.tensor(0.1) / 3)
    assert answer[1:] == (0, False, False, 0, 0.7, None, 0)
    assert newest.sums(CPU)["lm loss"].tolist() == [1.0]
    assert newest.positions_before == {"consumed_train_samples": 16, "skipped_train_samples": 1}
    assert (newest.operations_before, newest.operations) == (10.0, 25.0)


@pytest.mark.parametrize(
    ("skipped", "gathers_ahead", "told"), [(0, False, 0), (1, False, 1), (1, True, 0), (0, True, 0)]
)
def test_gathering_ahead_begins_where_it_had_begun(
    skipped: int, gathers_ahead: bool, told: int
) -> None:
    # train() turns it on behind the first update that is not skipped.
    newest = trained(skipped, gathers_ahead)
    assert newest.replay(CPU)[SKIPPED] == told
    assert newest.skipped == skipped


def test_nothing_is_known_at_the_start() -> None:
    newest = Newest(3.0)
    assert not newest.known
    assert newest.positions_before == {}
    assert newest.operations_before == 3.0
    assert newest.sums(CPU) == {}
    other = Newest(0.0)
    other.restore(json.loads(json.dumps(newest.to_dict())))
    assert not other.known


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
    kept = json.loads(json.dumps(encode(value)))
    assert repr(decode(kept, CPU)) == repr(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (0,)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 7).to(dtype)
    kept = json.loads(json.dumps(encode({"lm loss": tensor})))
    found = decode(kept, CPU)["lm loss"]
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found, tensor)


def test_odd_losses_come_back() -> None:
    found = decode(encode(torch.tensor([math.inf, -math.inf, -0.0, 1e-45])), CPU)
    assert found.tolist()[:2] == [math.inf, -math.inf]
    assert str(found[2].item()) == "-0.0"
    assert found[3].item() > 0


def test_what_cannot_be_given_back_is_an_error() -> None:
    with pytest.raises(TypeError, match="object"):
        encode((1, object()))


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
