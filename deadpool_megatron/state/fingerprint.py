"""A cheap fingerprint of tensors, computed where they live, to compare peers after a restore.

Not cryptographic: it finds the accidents that matter (a missed parameter sync, a wrong shard), at
the price of one read of the parameters. The sum of position-weighted words catches swapped and
shifted content, which a plain sum does not.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_WORD = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Eight bytes a word and step of the sums, of memory that training leaves free.
_BLOCK_WORDS = 1 << 22
_PERIOD = 8191  # prime, so that the weights do not align with power-of-two shapes


def fingerprint(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """int64 tensor of shape (2,): plain and weighted sum (mod 2**64) of all words."""
    total = torch.zeros(2, dtype=torch.int64, device=device)
    for index, tensor in enumerate(tensors):
        words = tensor.detach().contiguous().reshape(-1)
        words = words.view(_WORD[words.element_size()])
        for start in range(0, words.numel(), _BLOCK_WORDS):
            block = words[start : start + _BLOCK_WORDS].to(torch.int64)
            end = start + block.numel()
            weights = torch.arange(start, end, dtype=torch.int64, device=words.device)
            total[0] += block.sum()
            total[1] += weights.remainder_(_PERIOD).add_(index + 1).mul_(block).sum()
    return total
