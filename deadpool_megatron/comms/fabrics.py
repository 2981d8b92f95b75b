"""The fabric behind the groups of a transport: "gloo", "nccl", or MODULE:FACTORY, which tests give
for what plays NCCL: ``FACTORY(epoch, address)`` makes it.
"""

from __future__ import annotations

import importlib
import threading

from deadpool_megatron.comms.gloo.fabric import GlooFabric
from deadpool_megatron.comms.in_flight.epoch import Epoch
from deadpool_megatron.comms.inner import Fabric

_lock = threading.Lock()


def fabric_of(epoch: Epoch, transport: str, address: str | None) -> Fabric:
    """Returns the fabric of the epoch, made at the first call. Any thread."""
    with _lock:
        fabric = epoch.fabric_of.get(transport)
        if fabric is None:
            fabric = _make(epoch, transport, address)
            epoch.fabric_of[transport] = fabric
            epoch.fabrics.append(fabric)
    return fabric


def _make(epoch: Epoch, transport: str, address: str | None) -> Fabric:
    if transport == "gloo":
        return GlooFabric(epoch, address)
    if transport == "nccl":
        from deadpool_megatron.comms.nccl.fabric import NcclFabric

        return NcclFabric(epoch)
    module, _, factory = transport.partition(":")
    played: Fabric = getattr(importlib.import_module(module), factory)(epoch, address)
    return played
