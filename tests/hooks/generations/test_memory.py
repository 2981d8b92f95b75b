"""Slots that are made before there is a role leave the room for what is kept for others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.hooks.generations.memory import park
from deadpool_megatron.layout.records import Seat
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.errors import NoRoom
from deadpool_megatron.vault.member.client import VaultClient
from deadpool_megatron.vault.shm.geometry import segment_bytes
from tests.vault.harness import make_layout

LAYOUT = make_layout(0, nbytes=3 << 20)


@pytest.mark.parametrize(("share", "fits"), [(1.5, False), (2.5, True)])
def test_copies_come_first(tmp_path: Path, share: float, fits: bool) -> None:
    limit = int(share * segment_bytes(LAYOUT))
    settings = replace(Settings(), memory_gb=limit / 1e9)
    client = VaultClient(
        "", tmp_path, Seat(0, 0, 0), connect_seconds=0.0, memory_bytes=settings.memory_bytes
    )
    if fits:
        park(client, LAYOUT, 1, settings, nodes=2)
    else:
        with pytest.raises(NoRoom, match="--deadpool-memory-gb"):
            park(client, LAYOUT, 1, settings, nodes=2)
    assert bool(list(tmp_path.glob(".parked-*"))) == fits
