"""The seam for one dimension of parallelism: what peers can rebuild, and hold equal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron.hooks.loop import ProtectedLoop
from deadpool_megatron.state.packing import fingerprint


class PeerMismatch(RuntimeError):
    """After a restore, peers that must hold equal bytes do not; the message names them."""


class DimensionHook(ABC):
    """Registered once per built loop; all methods run on the member's main thread."""

    name: str

    @abstractmethod
    def rebuild_from_peers(self) -> None:
        """Collectively derive what need not be restored from a slot."""

    @abstractmethod
    def verify(self) -> None:
        """Collectively compare what peers must hold equally. Raises PeerMismatch."""


def compare_with_peers(tensors: Sequence[Tensor], group: dist.ProcessGroup, what: str) -> None:
    """Raise PeerMismatch unless all ranks of ``group`` hold bit-equal ``tensors``."""
    if dist.get_world_size(group) == 1:
        return
    device = tensors[0].device if tensors else current_device()
    own = fingerprint(tensors, device)
    seen = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(seen, own, group=group)
    odd = [
        role
        for role, other in zip(dist.get_process_group_ranks(group), seen, strict=True)
        if not torch.equal(other, own)
    ]
    if odd:
        raise PeerMismatch(f"{what} of roles {odd} differ from role {dist.get_rank()}")


def current_device() -> torch.device:
    """Returns where the groups communicate."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def parameters(loop: ProtectedLoop, *, expert: bool) -> list[torch.nn.Parameter]:
    """Dense or expert parameters of all chunks, in module order (Megatron marks experts so)."""
    return [
        parameter
        for chunk in loop.model_chunks
        for parameter in chunk.parameters()
        if (not getattr(parameter, "allreduce", True)) == expert
    ]
