"""Which slot a member may overwrite: never what somebody may still need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.layout.records import Generation
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.member.slot_choice import free_slot
from deadpool_megatron.vault.shm.segment import SlotState

EMPTY, WRITING, FILLED, SEALED = SlotState
NOTHING = (EMPTY, 0, 0)


@pytest.mark.parametrize(
    ("slots", "floor", "chosen"),
    [
        ([(SEALED, 1, 5), NOTHING], (1, 5), 1),
        ([(SEALED, 1, 5), (WRITING, 1, 4)], (1, 5), 1),
        ([(SEALED, 1, 6), (SEALED, 1, 4), (SEALED, 1, 5)], (1, 6), 1),
        # What is committed is kept until the next one is.
        ([(SEALED, 1, 6), (SEALED, 1, 5)], (1, 5), None),
        ([(SEALED, 1, 6), (SEALED, 1, 4), (SEALED, 1, 5)], (1, 5), 1),
        # The newest that is sealed is kept, though a newer one is said to be committed.
        ([(SEALED, 1, 5), (FILLED, 1, 7)], (1, 7), None),
        # Of a closed epoch, and never sealed.
        ([(SEALED, 0, 5), (FILLED, 0, 6)], (0, 5), 1),
        # Nothing is known to be committed.
        ([(SEALED, 0, 6), (SEALED, 0, 5)], None, 1),
        ([(SEALED, 1, 6), (SEALED, 1, 5)], None, None),
    ],
)
def test_in_epoch_1(
    slots: list[tuple[SlotState, int, int]], floor: tuple[int, int] | None, chosen: int | None
) -> None:
    segment: Any = SimpleNamespace(
        slots=len(slots),
        layout=SimpleNamespace(role=0),
        state=lambda slot: slots[slot][0],
        generation=lambda slot: Generation(*slots[slot][1:]),
    )
    known = None if floor is None else Generation(*floor)
    if chosen is not None:
        assert free_slot(segment, 1, known) == chosen
        return
    with pytest.raises(VaultError, match="may be overwritten"):
        free_slot(segment, 1, known)
