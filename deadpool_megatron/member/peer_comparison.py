"""The comparison, by fingerprints, of tensors that must be equal on all peers of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from deadpool_megatron.state.parts import fingerprint


class PeerMismatch(RuntimeError):
    """Peers that must hold equal bytes hold different bytes; the message has their ranks."""


def compare_with_peers(tensors: Sequence[Tensor], group: dist.ProcessGroup, subject: str) -> None:
    """Raise PeerMismatch unless all ranks of ``group`` hold bit-equal ``tensors``."""
    if dist.get_world_size(group) == 1:
        return
    device = tensors[0].device if tensors else current_device()
    own = fingerprint(tensors, device)
    found = gather_by_role(own, group)
    bad = [role for role, other in found.items() if not torch.equal(other, found[dist.get_rank()])]
    if bad:
        raise PeerMismatch(f"{subject} of roles {bad} differ from role {dist.get_rank()}")


def gather_by_role(own: Tensor, group: dist.ProcessGroup) -> dict[int, Tensor]:
    """Gather the tensor ``own`` of each rank of ``group``, on the host, by the rank in the world,
    which is the role at full size. Collective."""
    ranks = dist.get_process_group_ranks(group)
    tensors = [torch.empty_like(own) for _ in ranks]
    dist.all_gather(tensors, own, group=group)
    return dict(zip(ranks, torch.stack(tensors).cpu(), strict=True))


def current_device() -> torch.device:
    """Return the device on which the groups communicate."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
