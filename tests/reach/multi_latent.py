"""Runs pretrain_gpt.py with an attention that takes heads of two widths, and packed sequences (as
one): Megatron-LM's own for these is Transformer Engine's. PYTHONPATH names the checkout."""

import runpy
from typing import Any

from megatron.core.models import backends
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import Tensor


class _Attention(DotProductAttention):
    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # It is made twice, at first without.
        if v_channels:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        packed = packed_seq_params is not None
        given = [t.unsqueeze(1) if packed else t.contiguous() for t in (query, key, value)]
        found = super().forward(*given, *args, packed_seq_params=None, **kwargs)
        return found.squeeze(1) if packed else found


backends.DotProductAttention = _Attention

if __name__ == "__main__":
    runpy.run_module("pretrain_gpt", run_name="__main__", alter_sys=True)
