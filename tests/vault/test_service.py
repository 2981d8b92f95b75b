"""What the agent of a vault is told when an order cannot be carried out."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.settings import Settings
from deadpool_megatron.vault.service import Vault
from tests.vault.fake_network import FakeNetwork


def test_a_moment_without_threads_costs_an_order_and_not_the_agent_its_vault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not connect again to a vault that lives; such a one ends itself, minutes later."""
    told: list[dict[str, Any]] = []
    link: Any = SimpleNamespace(send=told.append)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with socket.socket(socket.AF_UNIX) as local:
        network = FakeNetwork().transport("here", 1, 1.0)
        vault = Vault(0, tmp_path, Settings(), network, local)
        monkeypatch.setattr(threading.Thread, "start", start)
        order = {"id": 7, "name": "export", "iteration": 4, "limit_seconds": 1.0}
        for kind in ("take", "dump"):
            vault._order(link, {"t": kind, **order})
    refused = {"t": "reply", "id": 7, "ok": False, "code": "failed"}
    text = "this host has no thread left for it"
    assert told == [{**refused, "text": f"{kind}: {text}"} for kind in ("take", "dump")]
