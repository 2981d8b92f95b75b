"""The answer to ``deadpool status``, as one JSON object: the machine's state and the newest
beats."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from deadpool_megatron.cluster.coordinator.progress import Progress
from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine.state.state import State
from deadpool_megatron.layout.schemes import in_words

_SHOWN_FAILURES = 5
# Describing a run may take this part of the coordinator's time, however many people watch it.
_SHARE_OF_TIME = 0.1


class PacedStatus:
    """The description of a run, made in a thread, as it goes over all roles; in a large one it is
    made again only after a while. For the coordinator's loop.
    """

    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make
        self._made: dict[str, Any] = {}
        self._good_until = 0.0
        self._making = asyncio.Lock()

    async def newest(self) -> dict[str, Any]:
        """As of now, or of so little ago that another one would take too much time."""
        async with self._making:
            began = time.monotonic()
            if began >= self._good_until:
                self._made = await asyncio.to_thread(self._make)
                ended = time.monotonic()
                self._good_until = ended + (ended - began) / _SHARE_OF_TIME
            return self._made


def role_beats(state: State, peers: Peers) -> dict[int, dict[str, Any]]:
    """Newest beat of the very process that plays each role; roles without one are missing."""
    found = {}
    for role, seat in sorted(state.seats.items()):
        peer = peers.agents.get(seat.node)
        beat = {} if peer is None else peer.beats.get(seat.slot, {})
        if beat.get("incarnation") == seat.incarnation and "section" in beat:
            found[role] = beat
    return found


def describe(state: State, peers: Peers, progress: Progress) -> dict[str, Any]:
    """Keys: epoch, phase, waiting_for, iteration, roles, nodes, spares, recoveries, failures (the
    last ones), failing (the one that is being recovered from), aside, refusals, and more.
    """
    record = state.record
    beats = role_beats(state, peers)
    roles: dict[str, Any] = {}
    for role, seat in sorted(state.seats.items()):
        beat = beats.get(role, {})
        roles[str(role)] = {
            "seat": seat.to_list(),
            "section": beat.get("section", "unknown"),
            "iteration": beat.get("iteration"),
            "waiting": beat.get("waiting"),
            "own": beat.get("own"),
        }
    training = {seat.node for seat in state.seats.values()}
    nodes = {
        str(node): {
            "host": known.host,
            "domain": known.domain,
            "spare": node not in training,
            "restarts": known.restarts,
            "standing": str(known.judged.standing),
            "reasons": list(known.judged.reasons),
            "vault": {} if node not in peers.agents else peers.agents[node].vault,
        }
        for node, known in sorted(state.fleet.nodes.items())
    }
    return {
        "epoch": 0 if record is None else record.epoch,
        "phase": str(state.phase),
        "waiting_for": state.waiting_for(),
        "cause": "" if record is None else record.cause,
        "iteration": progress.last_iteration,
        "roles": roles,
        "nodes": nodes,
        "spares": sorted(set(state.fleet.nodes) - training),
        "members": {
            f"{node}.{slot}.{member.incarnation}": str(member.status)
            # Each sort holds up all threads, so there is none over all members.
            for node, slots in sorted(state.fleet.members.by_node.items())
            for slot, member in sorted(slots.items())
        },
        "recoveries": state.recoveries.count,
        "steps_recomputed": state.recoveries.steps_recomputed,
        "failures": [
            {"epoch": report.epoch, "kind": report.kind, "cause": report.cause}
            for report in state.recoveries.finished[-_SHOWN_FAILURES:]
        ],
        "failing": {}
        if state.recoveries.current is None
        else {
            "kind": state.recoveries.current.kind,
            "cause": "; then ".join(state.recoveries.current.causes),
        },
        "aside": sorted(state.fleet.aside & set(state.fleet.nodes)),
        "protection": "" if record is None else in_words(record.protection, record.replicas),
        "requests": [request.to_dict() for request in state.requests],
        "fewer_copies": [] if record is None else sorted(record.fewer_copies),
        "refusals": peers.refusals,
        "diverged": progress.diverged,
    }
