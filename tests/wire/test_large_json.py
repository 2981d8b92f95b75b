"""Large objects are encoded in parts, to the same text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_megatron.wire import large_json

_LEAVES = st.none() | st.booleans() | st.integers() | st.text() | st.lists(st.integers())
_VALUES = st.dictionaries(
    st.text(),
    st.recursive(_LEAVES, lambda inner: st.dictionaries(st.text(), inner), max_leaves=20),
)


@pytest.mark.slow
@given(_VALUES, st.integers(0, 3000))
def test_the_text_is_that_of_the_standard_library(values: dict[str, Any], many: int) -> None:
    whole = {**values, "restore": {"sources": {str(role): values for role in range(many // 50)}}}
    whole["seats"] = {str(role): [role, 0, 1] for role in range(many)}
    assert large_json.dumps(whole) == json.dumps(whole, separators=(",", ":"))
