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
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, RoleLayout
from deadpool_megatron.layout.replaying import NO_BASE
from deadpool_megatron.vault.chain import Chain
from deadpool_megatron.vault.segment import checksum
from deadpool_megatron.vault.state import VaultState
from deadpool_megatron.vault.table import Place
from deadpool_megatron.vault.traffic import Flow
from deadpool_megatron.vault.transport import Channel, Transport
from deadpool_megatron.wire.framing import WireError

log = logging.getLogger(__name__)
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 0.5
# The shipper of the head of a chain is woken by the same news; should it not come, go alone.
_PATIENCE_SECONDS = 2.0
# For those behind the first of a chain, beyond the time that the first has taken.
_LINK_SECONDS = 1.0


class Shipper(threading.Thread):
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
        super().__init__(name=f"ship-{layout.role}-to-{node}", daemon=True)
        self._chain = chain
        self._passed_over: float | None = None  # since when another one should reach this node
        self._state = state
        self._transport = transport
        self._layout = layout
        self._node = node
        self._epoch = epoch
        self._channel: Channel | None = None

    def run(self) -> None:
        """Until the epoch is closed."""
        pause = _FIRST_PAUSE_SECONDS
        while self._state.is_open(self._epoch):
            work = self._next()
            if work is None:
                continue
            links = work[2]
            try:
                done = self._put(*work)
            except (OSError, WireError, LookupError, TypeError, ValueError) as error:
                log.info("%s: %s: %s", self.name, type(error).__name__, error)
                self._disconnect()
                done = False
            self._release(links)
            if done:
                pause = _FIRST_PAUSE_SECONDS
            else:
                with self._state.changed:
                    self._state.changed.wait_for(
                        lambda: not self._state.is_open(self._epoch), timeout=pause
                    )
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            with self._state.lock:
                self._chain.idle(self._node)
        self._disconnect()

    def cut(self) -> None:
        """Break the connection, from any thread: the epoch is over."""
        channel = self._channel
        if channel is not None:
            channel.shutdown()

    def _disconnect(self) -> None:
        """Only this thread closes: a descriptor must not be reused under its feet."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _next(self) -> tuple[Generation, list[Place], tuple[int, ...]] | None:
        """What the node lacks, and the nodes that are to get the same through it; None when there
        is nothing to do at the moment."""
        with self._state.changed:
            work = self._state.shipment(self._layout, self._node, self._epoch)
            patience, links = 1.0, None
            if work is not None:
                links = self._links(work[0].iteration)
                patience = _PATIENCE_SECONDS
            if work is not None and links is not None:
                self._passed_over = None
                self._chain.begin(self._node, links)
                return *work, links
            if self._state.is_open(self._epoch):
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

    def _put(self, generation: Generation, places: list[Place], links: tuple[int, ...]) -> bool:
        """True when the buddy has the parts; False to try again after a pause."""
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
                self._send_part(channel, flow, place)
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

    def _connect(self) -> Channel:
        if self._channel is None:
            address = self._state.address(self._node)
            if address is None:
                raise WireError(f"node {self._node} has no address in epoch {self._epoch}")
            channel = self._transport.connect(address.host, address.vault_port)
            self._channel = channel
            if not self._state.is_open(self._epoch):
                raise WireError("the epoch was closed while connecting")
            channel.give_way(self._state.settings.dscp)
            channel.send({"t": "offer", "layout": self._layout.to_dict()})
        return self._channel

    def _send_part(self, channel: Channel, flow: Flow, place: Place) -> None:
        sent = 0
        for chunk in flow.pieces(place.view, self._going):
            chunk = failpoints.perhaps_damaged(
                chunk,
                "vault.chunk",
                role=self._layout.role,
                iteration=flow.generation.iteration,
                to=self._node,
                part=place.name,
            )
            channel.send_bulk(chunk)
            self._state.counters["bytes shipped"] += len(chunk)
            sent += len(chunk)
        if sent < place.nbytes:
            raise WireError("the epoch was closed")

    def _going(self) -> bool:
        return self._state.is_open(self._epoch)

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

    def _examine(self, place: Place) -> None:
        """The buddy found other bytes than were announced: was it the wire or our memory?"""
        found = checksum(place.view)
        if found != place.checksum:
            self._state.mark_bad(place, found)
