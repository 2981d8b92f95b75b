"""What a member takes its vault's word for, by itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deadpool_megatron.layout.records import Generation, Seat
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.vault.member.client import VaultClient


@pytest.fixture
def client(tmp_path: Path) -> VaultClient:
    """In epoch 1, of which generation 6 is committed as it was right after its step."""
    client = VaultClient("", tmp_path, Seat(0, 0, 0), connect_seconds=1.0)
    client._enter(1)
    committed = {"epoch": 1, "generation": [1, 6], "boundary": "step", "released": False}
    client._take({"t": "committed", **committed})
    return client


@pytest.mark.parametrize(
    ("generation", "boundary", "answer"),
    [
        (5, "save", "committed"),
        (6, "step", "committed"),
        (6, "evaluation", "interrupted"),
        (7, "step", "interrupted"),
    ],
)
def test_the_gate_opens_for_what_is_committed_to_its_boundary(
    client: VaultClient, generation: int, boundary: str, answer: str
) -> None:
    interrupt = os.eventfd(1, os.EFD_CLOEXEC)
    reports = {"on_wait": lambda _: None, "report_every_seconds": 9.0}
    gate = client.wait_committed(
        Generation(1, generation), boundary, deadline_seconds=9.0, interrupted=interrupt, **reports
    )
    os.close(interrupt)
    assert gate == answer


def test_what_an_epoch_began_with_is_written_again_in_that_epoch_only(client: VaultClient) -> None:
    client._restored = Generation(0, 4)
    with pytest.raises(VaultError, match="not registered"):
        client.begin(Generation(0, 4), 1)
    client._enter(2)
    assert client.newest_committed is None
    with pytest.raises(VaultError, match="was not computed in epoch 2"):
        client.begin(Generation(0, 4), 2)
