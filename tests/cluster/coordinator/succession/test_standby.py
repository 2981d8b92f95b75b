"""What a standby sees and hears beside the journal."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator.succession import standby
from deadpool_megatron.cluster.coordinator.succession.standby import Standby, _Result
from deadpool_megatron.settings import Settings


def made(tmp_path: Path) -> Standby:
    run = SimpleNamespace(final=tmp_path / "final.json")
    info = SimpleNamespace(settings=Settings(), nodes=2, spares=1, ended_term=0)
    options: Any = SimpleNamespace(run=run, info=info, node=2)
    journal: Any = None
    return Standby(options, journal)


def test_a_result_on_a_file_system_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """With the journal elsewhere the looks go on; the result is seen once it can be."""
    final = tmp_path / "final.json"
    result = _Result(final)
    assert result.look() is None
    os.mkfifo(final)
    for _ in range(3):
        assert result.look() is None
    with open(final, "w") as file:
        file.write(json.dumps({"slots_kept": True}))
    assert result._thread is not None
    result._thread.join(20.0)
    assert result.look() == {"slots_kept": True}


def test_orders_of_the_agent_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = made(tmp_path)
    assert (one._place, one._lost, one.was_in_touch) == (0, True, False)
    pieces = [b"place 7\nfo", b"und\n", b"lost\nplace 12\n", b""]
    monkeypatch.setattr(standby, "readable", lambda *_: True)
    monkeypatch.setattr(os, "read", lambda *_: pieces.pop(0))
    assert one._pause()
    assert (one._place, one._lost) == (7, True)
    assert one._pause()
    assert (one._place, one._lost, one.was_in_touch) == (7, False, True)
    assert one._pause()
    assert (one._place, one._lost, one.was_in_touch) == (12, True, True)
    assert not one._pause(), "the agent is gone"
