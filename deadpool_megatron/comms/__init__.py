"""Reconfigurable communicators: torch.distributed groups that survive the loss of a peer."""

from __future__ import annotations

from .communicators import Communicators
from .errors import CommunicatorFault, EpochClosed
from .group import ReconfigurableGroup
from .inner import Fabric, GroupSpec, InnerGroup
from .store import EpochStore


def is_detached(group: object) -> bool:
    """Whether ``group`` is one of ours without peers: its operations complete locally."""
    return isinstance(group, ReconfigurableGroup) and group.inner.detached


__all__ = [
    "CommunicatorFault",
    "Communicators",
    "EpochClosed",
    "EpochStore",
    "Fabric",
    "GroupSpec",
    "InnerGroup",
    "ReconfigurableGroup",
    "is_detached",
]
