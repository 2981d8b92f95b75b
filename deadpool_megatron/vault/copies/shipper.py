"""Sending a role's sealed parts to a buddy, again and again until it has them or the epoch ends.

Nothing is queued: what is owed follows from the table and the ledger, so a broken connection, a
stopped or restarted buddy and a restart of this vault all resume by looking again.

One put: ``put`` with the parts on offer and the checksums of those that peers hold anyway,
``need`` with those the buddy lacks, their raw bytes in that order, ``sealed``. The bytes go from
the mapped slot to the socket without a copy in Python.

Each of several buddies is sent its own copy, by a thread of its own: none waits for another.
"""

from __future__ import annotations

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.vault.core.sender import Sender, Work
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import Refusal, Refused
from deadpool_megatron.vault.net.transport import Transport
from deadpool_megatron.vault.shm.table import Place


class Shipper(Sender):
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

    def _bring(self, work: Work) -> bool:
        """True when the buddy has the parts; False to try again after a pause."""
        generation, places = work
        failpoints.hit(
            "vault.ship", role=self._layout.role, iteration=generation.iteration, to=self._node
        )
        channel = self._connect()
        with self._state.lock:
            follows = self._state.steps.follows(self._layout.role, generation)
        base = None if follows is None else follows.to_list()
        elsewhere = self._state.elsewhere(self._layout, generation)
        channel.send(self._offered("put", work, follows=base, elsewhere=elsewhere))
        answer = channel.receive()
        if refused := Refused.in_answer(answer):
            return self._refused(refused, generation, places)
        wanted = set(answer["parts"])
        nbytes = sum(place.nbytes for place in places if place.name in wanted)
        role, traffic = self._layout.role, self._state.traffic
        with traffic.flow(role, generation, nbytes, self._epoch, channel.sent) as flow:
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
            self._state.reports.refuse(f"put: {refused}", role=self._layout.role, by=self._node)
        return False
