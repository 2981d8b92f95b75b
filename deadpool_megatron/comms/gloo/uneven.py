"""all_gather and reduce_scatter with a different size per rank, which gloo refuses and NCCL takes.

One broadcast (or reduce) per rank instead. All ranks see the same list of sizes, so they agree on
when to do so. Plain calls go to gloo unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import BroadcastOptions, ReduceOptions

from deadpool_megatron.platform.gathers import SeveralWorks


def allgather(
    plain: Any,
    rank: int,
    output_lists: Sequence[Sequence[torch.Tensor]] | Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] | torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """ProcessGroup.allgather; ``output_lists`` = [[one output per rank]], ``inputs`` = [input]."""
    outputs = output_lists[0] if output_lists else ()
    if isinstance(outputs, torch.Tensor) or _even(outputs):
        return plain.allgather(output_lists, inputs, *args, **kwargs)
    source = (inputs if isinstance(inputs, torch.Tensor) else inputs[0]).detach()
    buffers = [torch.empty_like(o, memory_format=torch.contiguous_format) for o in outputs]
    buffers[rank].copy_(source.reshape(buffers[rank].shape))
    works = []
    for root, buffer in enumerate(buffers):
        if buffer.numel():
            options = BroadcastOptions()
            options.rootRank = root
            works.append(plain.broadcast([buffer], options))
    return SeveralWorks(works, list(zip(outputs, buffers, strict=True)), [source])


def reduce_scatter(
    plain: Any,
    rank: int,
    outputs: Sequence[torch.Tensor] | torch.Tensor,
    input_lists: Sequence[Sequence[torch.Tensor]] | Sequence[torch.Tensor],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """ProcessGroup.reduce_scatter; ``outputs`` = [output], ``input_lists`` = [[one per rank]]."""
    inputs = input_lists[0] if input_lists else ()
    if isinstance(outputs, torch.Tensor) or isinstance(inputs, torch.Tensor) or _even(inputs):
        return plain.reduce_scatter(outputs, input_lists, *args, **kwargs)
    given = kwargs.get("opts", args[0] if args else None)
    buffers = [i.clone(memory_format=torch.contiguous_format) for i in inputs]
    works = []
    for root, buffer in enumerate(buffers):
        if buffer.numel():
            options = ReduceOptions()
            options.rootRank = root
            if given is not None:
                options.reduceOp = given.reduceOp
            works.append(plain.reduce([buffer], options))
    result = buffers[rank].reshape(outputs[0].shape)
    return SeveralWorks(works, [(outputs[0], result)], buffers)


def _even(tensors: Sequence[torch.Tensor]) -> bool:
    if len(tensors) < 2:
        return True
    first = tensors[0].numel()
    return all(tensor.numel() == first for tensor in tensors)
