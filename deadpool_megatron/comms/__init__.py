"""Reconfigurable communicators: torch.distributed groups that survive the loss of a peer.

communicators  those of one process, exchangeable as a whole
groups/        what Megatron holds for the whole run
gloo, nccl     what stands behind the groups in an epoch
gathers        all-gathers of several tensors on gloo, as torch's own corrupt memory
in_flight/     the operations of one epoch, and its end
inner          the seam between them and torch, and what a call raises when peers fail
store          in which the communicators of one epoch meet
"""

from __future__ import annotations

from deadpool_megatron.comms.communicators import Communicators
from deadpool_megatron.comms.groups.group import ReconfigurableGroup
from deadpool_megatron.comms.in_flight.attached_epoch import Limits
from deadpool_megatron.comms.in_flight.device_time import StreamWaits
from deadpool_megatron.comms.inner import CommunicatorFault, EpochClosed
from deadpool_megatron.comms.store import EpochStore


def is_detached(group: object) -> bool:
    """True where ``group`` is one of ours without peers: its operations complete locally."""
    return isinstance(group, ReconfigurableGroup) and group.inner.detached


__all__ = [
    "CommunicatorFault",
    "Communicators",
    "EpochClosed",
    "EpochStore",
    "Limits",
    "ReconfigurableGroup",
    "StreamWaits",
    "is_detached",
]
