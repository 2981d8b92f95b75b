"""The bytes of a slot go into live tensors, in the calling thread."""

import torch

from deadpool_megatron.state.parts import Part


def load(part: Part, buffer: memoryview) -> None:
    with torch.no_grad():
        for tensor, view in zip(part.tensors, part.views(buffer), strict=True):
            tensor.copy_(view)
