"""The reads before a takeover; the journal is in calls/journal.txt."""

import json
import os
import time
from functools import partial

import pytest

from deadpool_megatron.cluster.coordinator import succession
from deadpool_megatron.cluster.coordinator.succession import RecoveredState
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.file_systems import TimedRead
from deadpool_megatron.layout.records import Generation, Restore


@pytest.mark.usefixtures("pipes_hang")
def test_takeover_does_not_wait_for_a_hanging_run_directory(tmp_path):
    run, journal = RunDirectory(tmp_path), Journal(tmp_path / "journal")
    os.mkfifo(run.latest)
    durable = TimedRead(partial(succession.valid_checkpoints, run))
    began = time.monotonic()
    assert succession.look_up(journal, durable) == RecoveredState(is_durable_read=False)
    assert time.monotonic() - began < 5.0
    saved = Restore("durable", Generation(1, 4), "save", str(tmp_path))
    run.latest.write_text(json.dumps({"valid": [saved.to_dict()]}))
    assert durable.look(20.0) == (saved,)
