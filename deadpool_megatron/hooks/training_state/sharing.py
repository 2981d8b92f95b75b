"""Peers that hold the same optimizer state capture a part of it each (REFT's shared snapshots).

Without Megatron's distributed optimizer all data-parallel peers hold, and would capture, the same
bytes. Dealt out to classes, each class captures its own piece of every tensor, and so many peers
are in a class as nodes have to hold a copy: the classes take the place of the shards of a
distributed optimizer with as many instances. After a restore every peer has the piece of its class
from a sealed slot, and gets the others from the peers that have restored them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class SharedCapture:
    """What the peers of one inner optimizer have in common, and who captures what of it.

    ``tensors``: all of its state, laid out alike in all peers. ``group``: the peers; ``classes``:
    into how many of them they are dealt, neighbours into different ones, since they are likely to
    be on one node.
    """

    def __init__(self, tensors: Sequence[Tensor], group: dist.ProcessGroup, classes: int) -> None:
        self.group = group
        self._tensors = list(tensors)
        self._roles = dist.get_process_group_ranks(group)
        self._classes = classes
        self._class = self._roles.index(dist.get_rank()) % classes

    @property
    def own_roles(self) -> list[int]:
        """Roles that capture the same bytes, the own one included."""
        return self._roles[self._class :: self._classes]

    def own_tensors(self) -> list[Tensor]:
        """What this role captures: the piece of its class of each tensor; whole tensors where
        there is nothing to gain, or they are not where the group communicates."""
        return [
            pieces(tensor, self._classes)[self._class] if self._is_cut(tensor) else tensor
            for tensor in self._tensors
        ]

    def gather(self) -> None:
        """Collectively bring the pieces of all classes into the tensors of all peers.

        As bytes: not every backend knows every dtype.
        """
        for tensor in self.tensors:
            for number, piece in enumerate(pieces(tensor, self._classes)):
                dist.broadcast(piece.view(torch.uint8), src=self._roles[number], group=self.group)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that are cut into pieces."""
        return [tensor for tensor in self._tensors if self._is_cut(tensor)]

    def _is_cut(self, tensor: Tensor) -> bool:
        where = self._tensors[0].device
        return tensor.is_contiguous() and tensor.device == where and tensor.numel() >= self._classes


def pieces(tensor: Tensor, count: int) -> tuple[Tensor, ...]:
    """Flat views of a contiguous tensor, each element in one of them, as even as can be."""
    return torch.tensor_split(tensor.detach().view(-1), count)
