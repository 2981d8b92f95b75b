"""Generations that stay on their own node: once, or twice in its memory (REFT's SMP and ARC).

Kept twice, a damaged slot of a process that has died is repaired without the network: a restore
looks at every place of a part on its node, and takes the first one whose checksum matches.

The second copies lie in ``copy-<role>.seg`` of the own node. They are owed and acknowledged like
the copy of a buddy, so a generation is committed when it is there twice. What a role restores from
its second copy comes into its own slot.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from deadpool_megatron import failpoints
from deadpool_megatron.layout.records import Generation, PartKind, RoleLayout, kind_of
from deadpool_megatron.vault.core import room
from deadpool_megatron.vault.core.state import VaultState
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.net.transport import Transport
from deadpool_megatron.vault.replicate import Sender, Work
from deadpool_megatron.vault.schemes.base import Scheme, Target
from deadpool_megatron.vault.shm.segment import Segment
from deadpool_megatron.vault.shm.table import Place
from deadpool_megatron.wire.framing import WireError


class Local(Scheme):
    """Nothing is owed to anybody."""

    def _ways(
        self, layout: RoleLayout, kind: PartKind
    ) -> Iterable[tuple[Sequence[Target], Collection[str]]]:
        return ()


class LocalTwice(Scheme):
    """All is owed to the own node once more, whatever peers hold: to be there without a network."""

    def _ways(
        self, layout: RoleLayout, kind: PartKind
    ) -> Iterable[tuple[Sequence[Target], Collection[str]]]:
        names = [one.name for one in layout.parts if kind_of(one.name) in (kind, PartKind.EXTRAS)]
        return [([Target(self._seats[layout.role])], names)]

    def sender(
        self, state: VaultState, transport: Transport, layout: RoleLayout, target: Target
    ) -> Sender:
        return Doubler(state, transport, layout, target, self.record.epoch)


class Doubler(Sender):
    """Thread that doubles one role's generations of one epoch; it never connects to anybody."""

    verb = "double"

    def _bring(self, work: Work) -> bool:
        """True when all parts are there twice; False to try again after a pause."""
        generation, places = work
        role = self._layout.role
        failpoints.hit("vault.double", role=role, iteration=generation.iteration)
        lacking = [place for place in places if not self._is_kept(generation, place)]
        doubled = [place.name for place in places if place not in lacking]
        try:
            if lacking:
                doubled += self._double(generation, lacking)
        except VaultError as error:
            self._state.reports.refuse(f"second copy: {error}", role=role)
        self._state.acknowledge(self._layout, generation, self._node, doubled, self._epoch)
        return len(doubled) == len(places)

    def _is_kept(self, generation: Generation, place: Place) -> bool:
        """Return whether the second copy has these bytes already, be it as the only place of
        them."""
        with self._state.lock:
            found = self._state.table.find(self._layout.role, generation, place.name)
        return any(
            other.segment.seat is None and other.checksum == place.checksum for other in found
        )

    def _double(self, generation: Generation, places: list[Place]) -> list[str]:
        """Copy the parts; returns the names of those sealed, none while no slot is free. Raises
        VaultError where there is no room, WireError at a close."""
        state = self._state
        names = [place.name for place in places]
        segment = room.ensure_copy(state, self._layout, generation, names)
        room.require_fit(segment, {place.name: place.nbytes for place in places})
        slot = state.claim(segment, generation, self._epoch)
        if slot is None:
            return []
        try:
            room.reserve(state, segment, names, slot, generation)
            return [place.name for place in places if self._copy(place, segment, slot)]
        finally:
            state.release(segment, slot)

    def _copy(self, place: Place, segment: Segment, slot: int) -> bool:
        """Copy and seal a part; False when its source turns out to be damaged."""
        state = self._state
        if not state.open_part(segment, slot, place.name, self._epoch):
            raise WireError("the epoch was closed")
        target = segment.data(slot, place.name, place.nbytes)
        found = place.copy_into(target, state.settings.chunk_bytes, self._require_open)
        if found != place.checksum:
            self._examine(place)
            return False
        sealed = state.seal_copy(
            segment, slot, place.name, place.nbytes, place.checksum, self._epoch
        )
        if not sealed:
            raise WireError("the epoch was closed")
        state.reports.counters["bytes doubled"] += place.nbytes
        state.fail_point_corrupt("vault.doubled", place.segment, place.slot, [place.name])
        return True

    def _require_open(self) -> None:
        if not self._going():
            raise WireError("the epoch was closed")
