"""Reconfigurable communicators: torch.distributed groups that survive the loss of a peer."""

from __future__ import annotations

from .communicators import Communicators
from .errors import CommunicatorFault, EpochClosed
from .group import ReconfigurableGroup
from .inner import Fabric, GroupSpec, InnerGroup

__all__ = [
    "CommunicatorFault",
    "Communicators",
    "EpochClosed",
    "Fabric",
    "GroupSpec",
    "InnerGroup",
    "ReconfigurableGroup",
]
