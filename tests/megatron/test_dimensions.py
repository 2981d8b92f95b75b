"""What peers of a dimension have to hold equally."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

from deadpool_megatron.megatron import dimensions


def test_offsets_of_heads_are_not_replicated(monkeypatch):
    chunk, compare = torch.nn.Module(), Mock()
    for name, size in (("norm", 3), ("softmax_offset", 2)):
        chunk.register_parameter(name, torch.nn.Parameter(torch.ones(size)))
    monkeypatch.setattr(dimensions, "parallel_state", Mock())
    monkeypatch.setattr(dimensions, "compare_with_peers", compare)
    loop: Any = SimpleNamespace(model_chunks=[chunk])
    dimensions.verify_tensor(loop)
    assert [len(one) for one in compare.call_args.args[0]] == [3]
