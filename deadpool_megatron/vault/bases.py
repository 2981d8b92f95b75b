"""The buddy's side of a base: which part of which member here has an owner's weights, and when.

The part is sealed with the rest of its member's generation, about when the owner's own slot is, so
it is there as a rule before the owner's bytes have arrived. It stays until all roles have committed
something newer (design, section 4), so for as long as the owner's put can matter; whatever is read
of it, the checksum of what was made with it decides.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from deadpool_megatron.layout.bases import base_part, kept_for
from deadpool_megatron.layout.records import Generation, RoleLayout, Seat
from deadpool_megatron.vault.segment import PartState, Segment, SlotState
from deadpool_megatron.vault.state import VaultState


@dataclass(frozen=True)
class Base:
    """A part of a member seated here; its generations come and go."""

    segment: Segment
    name: str

    def sealed(self, generation: Generation, epoch: int) -> memoryview | None:
        """Its bytes in one generation of this epoch; None while they are not sealed."""
        segment = self.segment
        for slot, found in self._sealed_slots():
            entry = segment.entry(slot, self.name)
            whole = entry.state is PartState.SEALED and entry.nbytes <= segment.capacity(self.name)
            if found == generation and whole and entry.epoch == epoch:
                return segment.data(slot, self.name, entry.nbytes)
        return None

    def is_past(self, generation: Generation) -> bool:
        """Whether its member has sealed this generation, or a newer one."""
        return any(found >= generation for _, found in self._sealed_slots())

    def _sealed_slots(self) -> list[tuple[int, Generation]]:
        segment = self.segment
        return [
            (slot, segment.generation(slot))
            for slot in range(segment.slots)
            if segment.state(slot) is SlotState.SEALED
        ]


@dataclass(frozen=True)
class BasePlace:
    """Which member here keeps an owner's weights, and as which of its parts."""

    keeper: int
    seat: Seat
    name: str

    def base(self, state: VaultState) -> Base | None:
        """The part; None while its member has not made its slots."""
        with state.lock:
            segment = state.table.own(self.keeper, self.seat)
        if segment is None or all(part.name != self.name for part in segment.layout.parts):
            return None
        return Base(segment, self.name)


def find_place(state: VaultState, layout: RoleLayout, epoch: int) -> BasePlace | None:
    """Where the weights of the role of ``layout`` are kept on this node; None where nobody does."""
    with state.lock:
        record, own = state.record, state.own_roles()
    if record is None or record.epoch != epoch:
        return None
    kept = kept_for(record, layout.peers, state.settings.replicas)
    for keeper, owners in kept.items():
        if layout.role in owners and keeper in own:
            return BasePlace(keeper, own[keeper], base_part(owners.index(layout.role)))
    return None


def await_base(
    state: VaultState, base: Base, generation: Generation, epoch: int, seconds: float
) -> memoryview | None:
    """The bytes of ``base`` in a generation; None when they do not come, or not within
    ``seconds``, or the epoch is closed."""
    limit = time.monotonic() + seconds
    with state.changed:
        while state.is_open(epoch):
            found = base.sealed(generation, epoch)
            left = limit - time.monotonic()
            if found is not None or base.is_past(generation) or left <= 0:
                return found
            state.changed.wait(left)
    return None
