"""What the coordinator is told of a restore that does not succeed."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.hooks.process.entry import EpochEntry, RestoreFailed
from deadpool_megatron.layout.records import Generation, Restore, Source
from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.member.client import VaultClient
from tests.vault.harness import DEADLINE, Node, cluster, make_layout


class Entry(EpochEntry):
    """With everything around the vault of a node taken away."""

    def __init__(self, node: Node, restore: Restore, client: VaultClient) -> None:
        self.generation, self.boundary = restore.generation, restore.boundary
        self._settings, self._vault = node.settings, client
        self._link: Any = SimpleNamespace(interrupt_fd=os.eventfd(0, os.EFD_CLOEXEC))
        self._protection: Any = SimpleNamespace(layout=make_layout(0))


def test_a_place_that_cannot_be_reached_is_named_by_the_part_it_has(tmp_path: Path) -> None:
    """The next restore does without it. Unnamed it is planned again, until the run is given up."""
    with cluster(tmp_path, 2, roles=1, restore_seconds=0.5) as running:
        here, gone = running.nodes
        gone.kill()
        gone.tcp.close()
        sources = {0: {"extras@step": (Source(1, 0),)}}
        record = running.record(2, Restore("memory", Generation(1, 3), sources=sources))
        here.adopt(record)
        seat = record.seats[0]
        client = VaultClient(here.socket_path, here.directory, seat, connect_seconds=DEADLINE)
        here.clients.append(client)
        client.register(make_layout(0), 2)
        with pytest.raises(RestoreFailed, match="unreachable") as failed:
            Entry(here, record.restore, client)._restore_from_vault(record)
    assert failed.value.part == "extras@step"


def test_bytes_that_were_damaged_before_they_were_sealed_are_named_by_their_part() -> None:
    """Their checksums hold in all places, so what is older is tried next."""
    restore = Restore("memory", Generation(1, 3))
    sealed = SimpleNamespace(part=lambda _: b"\xcf" * 64, close=lambda: None)
    vault: Any = SimpleNamespace(restore=lambda *_, **__: sealed)
    node: Any = SimpleNamespace(settings=Settings())
    record: Any = SimpleNamespace(epoch=2)
    with pytest.raises(RestoreFailed, match="not encoded extras") as failed:
        Entry(node, restore, vault)._restore_from_vault(record)
    assert failed.value.part == "extras@step"
