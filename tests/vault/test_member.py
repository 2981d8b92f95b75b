"""What a member takes its vault's word for, by itself."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.member import SlotWriter, VaultClient, free_slot
from deadpool_megatron.vault.shm.segment import Segment, SlotState
from tests.vault.harness import make_layout


@pytest.fixture
def client(tmp_path: Path) -> VaultClient:
    """In epoch 1, of which generation 6 is committed as it was right after its step."""
    client = VaultClient("", tmp_path, Seat(0, 0, 0), connect_seconds=1.0)
    client._enter(1)
    committed = {"epoch": 1, "generation": [1, 6], "boundary": "step"}
    client._take({"t": "committed", **committed})
    return client


@pytest.mark.parametrize(
    ("generation", "boundary", "is_open"),
    [
        (5, "save", True),
        (6, "step", True),
        (6, "evaluation", False),
        (7, "step", False),
    ],
)
def test_the_gate_opens_for_what_is_committed_to_its_boundary(
    client: VaultClient, generation: int, boundary: str, is_open: bool
) -> None:
    interrupt = os.eventfd(1, os.EFD_CLOEXEC)
    reports = {"on_wait": lambda _: None, "report_every_seconds": 9.0}
    gate = client.wait_committed(
        Generation(1, generation), boundary, interrupted=interrupt, **reports
    )
    os.close(interrupt)
    assert gate is is_open


def test_what_an_epoch_began_with_is_written_again_in_that_epoch_only(client: VaultClient) -> None:
    client._restored = Generation(0, 4)
    with pytest.raises(VaultError, match="not registered"):
        client.begin(Generation(0, 4), 1)
    client._enter(2)
    assert client.newest_committed is None
    with pytest.raises(VaultError, match="was not computed in epoch 2"):
        client.begin(Generation(0, 4), 2)


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


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_slot_that_is_anothers_is_told_of_unless_the_epoch_was_closed(
    tmp_path: Path, is_closed: bool
) -> None:
    told: list[Any] = []
    segment = Segment.create(tmp_path / "own", make_layout(0), Seat(0, 0, 0), ["shard"])
    segment.mark_writing(0)
    segment.begin(0, Generation(1, 5), 1)
    writer = SlotWriter(told.append, segment, 0, Generation(1, 5), 1)
    segment.freeze(is_closed)
    segment.set_state(0, SlotState.EMPTY)
    with nullcontext() if is_closed else pytest.raises(VaultError, match="not that of"):
        writer.fill({"shard": 10})
    assert not told
