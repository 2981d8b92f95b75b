"""Extras: encoding without pickle, and random states that go on where they were."""

import json
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st

from deadpool_megatron.state import extras


def test_values_come_back():
    values = {
        "counters": {"iteration": 3},
        "blob": b"\x00\x01",
        "scale": torch.tensor([65536.0]),
        "flags": torch.tensor([[1, 0], [0, 1]], dtype=torch.bool),
        "empty": torch.empty(0, 4, dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "odd": torch.tensor([math.inf, -math.inf, -0.0, 1e-45]),
        "lr": 1e-3,
    }
    found = extras.decode(extras.encode(values))
    assert found["counters"] == {"iteration": 3}
    assert found["blob"] == b"\x00\x01"
    assert found["lr"] == 1e-3
    for key in ("scale", "flags", "empty", "scalar"):
        assert found[key].dtype == values[key].dtype
        assert found[key].shape == values[key].shape
        assert torch.equal(found[key], values[key])
    assert found["odd"].view(torch.int32).tolist() == values["odd"].view(torch.int32).tolist()


def test_blobs_come_back_from_anywhere_within():
    answer = ({"lm loss": torch.ones(3, dtype=torch.bfloat16) / 3}, None, 0.7, b"x", "\x00")
    losses, *others = extras.decode(extras.encode({"answer": answer}))["answer"]
    assert torch.equal(losses["lm loss"], answer[0]["lm loss"])
    assert others == [None, 0.7, b"x", "\x00"]


def test_decoded_tensors_are_fresh():
    payload = extras.encode({"scale": torch.ones(2)})
    first, second = extras.decode(payload), extras.decode(payload)
    first["scale"].zero_()
    assert second["scale"].tolist() == [1, 1]


def test_what_cannot_be_encoded_is_named():
    with pytest.raises(extras.ExtrasError, match="counters cannot be encoded"):
        extras.encode({"log_sums": {"loss": "0x0p+0"}, "counters": {"samples": object()}})


@given(st.binary(max_size=200))
def test_garbage_is_refused_not_executed(payload):
    try:
        extras.decode(payload)
    except extras.ExtrasError:
        pass


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
_ENTRY = _JSON | st.fixed_dictionaries(
    {"blob": st.just([0, 4]) | _JSON, "dtype": st.just("float32") | _JSON, "shape": _JSON}
)


@given(_JSON | st.dictionaries(st.text(max_size=4), _ENTRY, max_size=3))
@example(0)
@example({"x": "y"})
@example({"x": {"blob": [0, 4], "dtype": "nothing", "shape": [1]}})
@example({"x": {"blob": [0, 4], "dtype": "float32", "shape": [3]}})
def test_odd_headers_are_refused(header):
    text = json.dumps(header).encode()
    try:
        extras.decode(len(text).to_bytes(8, "little") + text + bytes(8))
    except extras.ExtrasError:
        pass


@given(st.integers(1, 40))
def test_truncated_extras_are_refused(cut):
    payload = extras.encode({"blob": bytes(100)})
    with pytest.raises(extras.ExtrasError):
        extras.decode(payload[:-cut])


def test_random_states_go_on_where_they_were():
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), torch.rand(1).item(), random.gauss(0, 1)]

    draw()
    kept = extras.decode(extras.encode(extras.capture_random_states()))
    wanted = [draw(), draw()]
    extras.restore_random_states(kept)
    assert [draw(), draw()] == wanted
