"""Sending a role's sealed parts to a buddy, again and again until it has them or the epoch ends.

Nothing is queued: what is owed follows from the table and the ledger, so a broken connection, a
stopped or restarted buddy and a restart of this vault all resume by looking again.

One put: ``put`` with the parts on offer, ``need`` with those the buddy lacks, their raw bytes in
that order, ``sealed``. The bytes go from the mapped slot to the socket without a copy in Python.

Each of several buddies is sent its own copy, by a thread of its own: none waits for another.
"""

from __future__ import annotations

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.core.sender import Sender
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import Refusal, Refused
from deadpool_megatron.vault.net.transport import Transport
from deadpool_megatron.vault.shm.table import Place

# Bounds what a lost wake-up could cost.
_LOOK_SECONDS = 1.0

_Put = tuple[Generation, list[Place]]


class Shipper(Sender[_Put]):
    """Thread that brings one role's generations of one epoch to one buddy."""

    def __init__(
        self,
        state: VaultState,
        transport: Transport,
        layout: RoleLayout,
        node: int,
        epoch: int,
    ) -> None:
        super().__init__(state, transport, layout, node, epoch, "ship")

    def _next(self) -> _Put | None:
        """What the node lacks; None when there is nothing to do at the moment."""
        with self._state.changed:
            work = self._state.shipment(self._layout, self._node, self._epoch)
            if work is None and self._going():
                self._state.changed.wait(_LOOK_SECONDS)
            return work

    def _bring(self, work: _Put) -> bool:
        """True when the buddy has the parts; False to try again after a pause."""
        generation, places = work
        failpoints.hit(
            "vault.ship", role=self._layout.role, iteration=generation.iteration, to=self._node
        )
        channel = self._connect()
        with self._state.lock:
            follows = self._state.steps.follows(self._layout.role, generation)
        channel.send(
            {
                "t": "put",
                "epoch": self._epoch,
                "node": self._state.node,
                "role": self._layout.role,
                "generation": generation.to_list(),
                "follows": None if follows is None else follows.to_list(),
                "layout_hash": self._layout.layout_hash,
                "parts": [[place.name, place.nbytes, place.checksum] for place in places],
            }
        )
        answer = channel.receive()
        if refused := Refused.in_answer(answer):
            return self._refused(refused, generation, places)
        wanted = set(answer["parts"])
        nbytes = sum(place.nbytes for place in places if place.name in wanted)
        flow = self._state.traffic.flow(
            self._layout.role, generation, nbytes, self._epoch, channel.busy_seconds
        )
        for place in places:
            if place.name in wanted:
                self._send_paced(channel, flow, place, place.view)
        answer = channel.receive()
        if refused := Refused.in_answer(answer):
            return self._refused(refused, generation, places)
        flow.end(self._node)
        sealed = set(answer["parts"])
        names = [place.name for place in places if place.name in sealed]
        self._state.shipped(self._layout.role, nbytes, self._epoch)
        self._state.acknowledge(self._layout, generation, self._node, names, self._epoch)
        damaged = [place for place in places if place.name not in sealed]
        for place in damaged:
            self._examine(place)
        return not damaged

    def _make_whole(self, generation: Generation) -> None:
        """What the step to a generation begins from was lost at some buddy."""
        with self._state.changed:
            self._state.steps.make_whole(self._layout.role, generation)
            self._state.changed.notify_all()

    def _refused(self, refused: Refused, generation: Generation, places: list[Place]) -> bool:
        if refused.why is Refusal.SUPERSEDED:
            names = [place.name for place in places]
            self._state.acknowledge(self._layout, generation, self._node, names, self._epoch)
            return True
        if refused.why is Refusal.NO_BASE:
            self._make_whole(generation)
            return True
        if refused.why is not Refusal.EARLY:
            self._state.refuse(f"put: {refused}", role=self._layout.role, by=self._node)
        return False
