"""Sending a role's sealed parts to a buddy, again and again until it has them or the epoch ends.

Nothing is queued: what is owed follows from the table and the ledger, so a broken connection, a
stopped or restarted buddy and a restart of this vault all resume by looking again.

One put: ``put`` with the parts on offer, ``need`` with those the buddy lacks, their raw bytes in
that order, ``sealed``. The bytes go from the mapped slot to the socket without a copy in Python.

Where several buddies lack the same, the put names those behind the first (``chain``), and after
``sealed`` comes one ``link`` for each of them: see :mod:`deadpool_megatron.vault.chain`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.layout.replaying import NO_BASE
from deadpool_megatron.vault.chain import Chain
from deadpool_megatron.vault.sending import Sender
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.table import Place
from deadpool_megatron.vault.traffic import Flow
from deadpool_megatron.vault.transport import Channel, Transport

log = logging.getLogger(__name__)
# The shipper of the head of a chain is woken by the same news; should it not come, go alone.
_PATIENCE_SECONDS = 2.0
# For those behind the first of a chain, beyond the time that the first has taken.
_LINK_SECONDS = 1.0


# What to send, and the nodes that are to get the same through the one it is sent to.
_Put = tuple[Generation, list[Place], tuple[int, ...]]


class Shipper(Sender[_Put]):
    """Thread that brings one role's generations of one epoch to one buddy."""

    def __init__(
        self,
        state: VaultState,
        transport: Transport,
        layout: RoleLayout,
        node: int,
        epoch: int,
        chain: Chain,
    ) -> None:
        super().__init__(state, transport, layout, node, epoch, "ship")
        self._chain = chain
        self._passed_over: float | None = None  # since when another one should reach this node

    def _next(self) -> _Put | None:
        """What the node lacks; None when there is nothing to do at the moment."""
        with self._state.changed:
            self._chain.idle(self._node)
            work = self._state.shipment(self._layout, self._node, self._epoch)
            patience, links = 1.0, None
            if work is not None:
                links = self._links(work[0].iteration)
                patience = _PATIENCE_SECONDS
            if work is not None and links is not None:
                self._passed_over = None
                self._chain.begin(self._node, links)
                return *work, links
            if self._going():
                self._state.changed.wait(timeout=patience)
            return None

    def _links(self, iteration: int) -> tuple[int, ...] | None:
        """The nodes behind this one; None while this one is, or should be, behind another."""
        if self._chain.taken(self._node):
            self._passed_over = None
            return None
        links = self._chain.links(self._node, iteration, self._lacks)
        if links is not None:
            return links
        now = time.monotonic()
        if self._passed_over is None:
            self._passed_over = now
        return () if now - self._passed_over >= _PATIENCE_SECONDS else None

    def _lacks(self, node: int) -> tuple[Generation, list[str]] | None:
        work = self._state.shipment(self._layout, node, self._epoch)
        return None if work is None else (work[0], [place.name for place in work[1]])

    def _release(self, nodes: Collection[int]) -> None:
        """These may be sent to by their own shippers again."""
        if nodes:
            with self._state.changed:
                self._chain.release(self._node, nodes)
                self._state.changed.notify_all()

    def _over(self, work: _Put) -> None:
        self._release(work[2])

    def _bring(self, work: _Put) -> bool:
        """True when the buddy has the parts; False to try again after a pause."""
        generation, places, links = work
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
                "chain": list(links),
            }
        )
        answer = channel.receive()
        if answer["t"] == "refused":
            return self._refused(answer, generation, places)
        if links and not answer.get("chain"):
            self._release(links)
            links = ()
        wanted = set(answer["parts"])
        nbytes = sum(place.nbytes for place in places if place.name in wanted)
        flow = self._state.traffic.flow(
            self._layout.role, generation, nbytes, self._epoch, channel.busy_seconds
        )
        for place in places:
            if place.name in wanted:
                self._send_paced(channel, flow, place, place.view)
        answer = channel.receive()
        if answer["t"] == "refused":
            if links:  # what they answer would come in between
                self._disconnect()
            return self._refused(answer, generation, places)
        flow.end(self._node)
        sealed = set(answer["parts"])
        names = [place.name for place in places if place.name in sealed]
        self._state.acknowledge(
            self._layout,
            generation,
            self._node,
            names,
            self._epoch,
            shipped_bytes=nbytes,
        )
        self._follow(channel, flow, links, places)
        damaged = [place for place in places if place.name not in sealed]
        for place in damaged:
            self._examine(place)
        return not damaged

    def _follow(
        self, channel: Channel, flow: Flow, links: tuple[int, ...], places: list[Place]
    ) -> None:
        """Hear of the nodes behind the first. They have their bytes at about the same time: who
        takes much longer is sent to directly, and those before are not held up any more."""
        iteration, left = flow.generation.iteration, list(links)
        limit = _LINK_SECONDS + flow.seconds
        end = time.monotonic() + limit
        while left:
            if not channel.readable(max(0.0, end - time.monotonic())):
                log.info("%s: nodes %s: no answer in %.1f s", self.name, left, limit)
                with self._state.lock:
                    self._chain.failed(left[0], iteration, "late")
                self._disconnect()
                return
            answer = channel.receive()
            node, why = int(answer["node"]), str(answer["why"])
            left.remove(node)
            sealed = set(answer["parts"])
            names = [p.name for p in places if p.name in sealed or why == "superseded"]
            if not why:
                flow.end(node)
            nbytes = sum(place.nbytes for place in places if place.name in sealed)
            self._state.acknowledge(
                self._layout, flow.generation, node, names, self._epoch, shipped_bytes=nbytes
            )
            if why == NO_BASE:
                self._make_whole(flow.generation)
            with self._state.lock:
                if why:
                    log.info("%s: behind it, node %d: %s", self.name, node, why)
                    self._chain.failed(node, iteration, why)
                else:
                    self._chain.reached(node)
            self._release([node])

    def _make_whole(self, generation: Generation) -> None:
        """What the step to a generation begins from was lost at some buddy."""
        with self._state.changed:
            self._state.steps.make_whole(self._layout.role, generation)
            self._state.changed.notify_all()

    def _refused(
        self, answer: Mapping[str, Any], generation: Generation, places: list[Place]
    ) -> bool:
        why = str(answer["why"])
        if why == "superseded":
            names = [place.name for place in places]
            self._state.acknowledge(
                self._layout, generation, self._node, names, self._epoch, shipped_bytes=0
            )
            return True
        if why == NO_BASE:
            self._make_whole(generation)
            return True
        if why != "early":
            self._state.refuse(f"put: {why}", role=self._layout.role, by=self._node)
        return False
