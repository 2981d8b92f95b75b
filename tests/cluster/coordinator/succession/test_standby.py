"""What a standby sees and hears beside the journal."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator.succession import standby
from deadpool_megatron.cluster.coordinator.succession.first_state import (
    Estate,
    look_up,
    valid_checkpoints,
)
from deadpool_megatron.cluster.coordinator.succession.standby import Standby
from deadpool_megatron.cluster.journal.choice import open_journal
from deadpool_megatron.cluster.process.glance import Glance
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.settings import Settings
from tests.cluster.journal.journal_steps import coordinator


def made(tmp_path: Path) -> Standby:
    run = RunDirectory(tmp_path)
    info = SimpleNamespace(settings=Settings(), nodes=2, spares=1, ended_term=0)
    options: Any = SimpleNamespace(run=run, info=info, node=2, report_fd=1)
    journal: Any = None
    return Standby(options, journal)


@pytest.mark.usefixtures("pipes_hang")
def test_a_result_on_a_file_system_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    """With the journal elsewhere the looks go on; the result is seen once it can be."""
    final = tmp_path / "final.json"
    one = made(tmp_path)
    assert one._look_for_result() is None
    os.mkfifo(final)
    for _ in range(3):
        assert one._look_for_result() is None
    with open(final, "w") as file:
        file.write(json.dumps({"slots_kept": True}))
    assert one._result.look(20.0) == {"slots_kept": True}


@pytest.mark.usefixtures("pipes_hang")
def test_a_takeover_does_not_wait_for_a_run_directory_that_hangs(tmp_path: Path) -> None:
    run, journal = RunDirectory(tmp_path), open_journal(Settings(), "run", tmp_path / "journal")
    os.mkfifo(run.latest)
    durable = Glance(partial(valid_checkpoints, run))
    began = time.monotonic()
    assert look_up(journal, durable) == Estate(is_durable_read=False)
    assert time.monotonic() - began < 5.0
    saved = Restore("durable", Generation(1, 4), "save", str(tmp_path))
    run.latest.write_text(json.dumps(saved.to_dict()))
    assert durable.look(20.0) == (saved,)


@pytest.mark.usefixtures("pipes_hang")
def test_a_coordinator_learns_later_of_a_checkpoint_that_could_not_be_read(tmp_path: Path) -> None:
    saved = Restore("durable", Generation(1, 4), "save", str(tmp_path))

    async def live() -> list[str]:
        one = coordinator(lambda _: journal, tmp_path, "run")
        os.mkfifo(one._run.latest)
        looking = asyncio.create_task(one._look_for_durable())
        await asyncio.sleep(0.1)
        assert not one._state.line.valid
        await asyncio.to_thread(one._run.latest.write_text, json.dumps(saved.to_dict()))
        await looking
        return [known.path for known in one._state.line.valid]

    journal = open_journal(Settings(), "run", tmp_path / "journal")
    assert asyncio.run(live()) == [saved.path]


@pytest.mark.parametrize(
    "entry",
    [
        *({}, {"host": "h", "port": None}, {"host": "h", "port": "x"}),
        {"host": "h", "port": math.inf},
    ],
)
def test_a_term_of_another_version_ends_no_standby(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], entry: dict[str, Any]
) -> None:
    """Each would end at it, and then the run would have no coordinator more."""
    one = made(tmp_path)
    one._journal = open_journal(Settings(), "run", tmp_path / "journal")
    one._journal.write("term", 1, {"node": None, "hostname": "h", "pid": 1, **entry})
    looks = iter((True, True, False))
    one._pause = lambda: next(looks)  # type: ignore[method-assign]
    assert one.watch() is None
    assert capfd.readouterr().err.count("what is there is not understood") == 1


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
