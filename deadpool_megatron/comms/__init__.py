"""Reconfigurable communicators: torch.distributed groups that survive the loss of a peer.

communicators  the communicators of a process, exchangeable as a whole
groups/        the process groups that a framework holds for the whole run
gloo, nccl     the communicators of an epoch
gathers        all-gathers of several tensors on gloo, because torch's own corrupt memory
in_flight/     the operations of an epoch, and the close of the epoch
inner          the seam between groups and communicators, and the errors of a call when peers fail
store          the store in which the communicators of an epoch meet
"""

from __future__ import annotations

from deadpool_megatron.comms.communicators import Communicators
from deadpool_megatron.comms.groups.group import ReconfigurableGroup
from deadpool_megatron.comms.in_flight.device_time import StreamWaits
from deadpool_megatron.comms.in_flight.epoch import Limits
from deadpool_megatron.comms.inner import CommunicatorFault, EpochClosed
from deadpool_megatron.comms.store import EpochStore


def is_detached(group: object) -> bool:
    """Return whether ``group`` is ours and without peers: its operations complete locally."""
    return isinstance(group, ReconfigurableGroup) and group.inner.detached


__all__ = ["CommunicatorFault", "Communicators", "EpochClosed", "EpochStore", "Limits"]
__all__ += ["ReconfigurableGroup", "StreamWaits", "is_detached"]
