"""Extras that are damaged or made up are refused; calls/extras.txt has the others."""

import json

import pytest
import torch
from hypothesis import example, given, strategies as st

from deadpool_megatron.state import extras


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


class _Away(torch.Tensor):
    """A tensor that says that it is on a device, and counts what the host waits for."""

    waits = 0
    device = property(lambda self: torch.device("cuda"))

    def cpu(self):
        _Away.waits += 1
        return self.as_subclass(torch.Tensor)


def test_extras_of_a_device_are_waited_for_once():
    tensors = {
        "bias": torch.arange(6.0).view(2, 3),
        "flag": torch.tensor(True),
        "none": torch.empty(0),
        "scale": torch.tensor(0.5, dtype=torch.bfloat16),
    }
    kept = {"count": 3, "host": torch.ones(2), "raw": b"xyz", "steps": [torch.tensor(7)]}
    away = {name: tensor.as_subclass(_Away) for name, tensor in tensors.items()}
    _Away.waits = 0
    payload = extras.encode({"bias": away.pop("bias"), **kept, **away})
    assert _Away.waits == 1
    assert payload == extras.encode({"bias": tensors.pop("bias"), **kept, **tensors})
