"""Which slot of its own segment a member writes next. Pure but for reading the segment's header."""

from __future__ import annotations

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.shm.segment import Segment, SlotState


def free_slot(segment: Segment, epoch: int, floor: Generation | None) -> int:
    """The slot to overwrite in ``epoch``: never the newest sealed one, nor anything that is not
    older than ``floor`` (the newest generation that is committed, or that the epoch began with);
    an empty one first, then the oldest. Raises VaultError when there is none.
    """
    slots = range(segment.slots)
    sealed = [segment.generation(s) for s in slots if segment.state(s) is SlotState.SEALED]
    newest = max(sealed, default=None)
    free: list[tuple[Generation, int]] = []
    for slot in slots:
        state, found = segment.state(slot), segment.generation(slot)
        if state in (SlotState.EMPTY, SlotState.WRITING):
            free.append((Generation(-1, -1), slot))
        elif state is SlotState.FILLED and found.lineage < epoch:
            free.append((found, slot))  # abandoned
        elif found != newest and (found < floor if floor else found.lineage < epoch):
            free.append((found, slot))
    if not free:
        raise VaultError(
            f"no slot of role {segment.layout.role} may be overwritten: newest committed is {floor}"
        )
    return min(free)[1]


def slot_of(segment: Segment, generation: Generation) -> int | None:
    """The slot that is sealed with a generation, whatever parts of it have been lost since."""
    for slot in range(segment.slots):
        if segment.state(slot) is SlotState.SEALED and segment.generation(slot) == generation:
            return slot
    return None
