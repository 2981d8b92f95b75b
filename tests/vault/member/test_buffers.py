"""The slot that a member writes: whose it is when it is handed over."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.member.buffers import SlotWriter
from deadpool_megatron.vault.shm.segment import Segment, SlotState
from tests.vault.harness import make_layout


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
