"""Agents that do not come back to a coordinator that has taken over: proof that they have ended.

An agent holds the listening socket of its vault open as long as it lives, and the vault closes it
with its agent. So a host that refuses connections there proves the end of the agent; silence proves
nothing. A firewall may refuse on behalf of a host: see docs/control-plane.md.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.cluster.machine.state import State, TakingOver
from deadpool_megatron.layout.records import NodeAddress
from deadpool_megatron.wire.framing import reset

# Of thousands of agents most are on their way: this many are tried at a time.
_MAX_PROBES = 64


async def probe_absent(
    state: State, feed: Callable[[inputs.Input], None], interval_seconds: float
) -> None:
    """Report the agents that are proved to have ended, until no agent is awaited any more."""
    while isinstance(state.phase_state, TakingOver) and state.record is not None:
        addresses = state.record.nodes
        absent = state.fleet.absent(addresses)
        tried = random.sample(absent, min(len(absent), _MAX_PROBES))
        probes = (_is_refused(addresses[node], interval_seconds) for node in tried)
        for node, is_refused in zip(tried, await asyncio.gather(*probes), strict=True):
            if is_refused:
                feed(inputs.AgentEnded(node))
        await asyncio.sleep(interval_seconds)


async def _is_refused(address: NodeAddress, limit_seconds: float) -> bool:
    """Return whether the host refuses connections to the vault; other errors prove nothing."""
    try:
        async with asyncio.timeout(limit_seconds):
            _, writer = await asyncio.open_connection(address.host, address.vault_port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    reset(writer)  # a vault does not see a connection that ends before its first byte
    return False
