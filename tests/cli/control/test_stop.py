"""``deadpool stop --dump`` and ``status --verdict``: a job ends before its time limit ends it."""

from __future__ import annotations

from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory.directory import read_json
from tests.cluster.counting_member import expected_sha256
from tests.cluster.running import Run, deadpool


@pytest.mark.full
@pytest.mark.slow
def test_state_is_saved_and_another_run_goes_on_from_it(tmp_path: Path) -> None:
    first = tmp_path / "first"
    with Run(first, "--step-seconds", "0.03") as run:
        run.wait_iteration(5)
        none_yet = deadpool("status", "--verdict", str(first))
        assert none_yet.returncode == 2
        assert "has no verdict" in none_yet.stderr
        stopped = deadpool("stop", "--dump", "--wait", "30", str(first))
        assert stopped.returncode == 0, stopped.stderr
        assert stopped.stdout.startswith("over, exit status 75: stopped by 'deadpool stop --dump'")
        reached = run.wait_end(75)["iterations"]
    assert read_json(run.run.latest)["kind"] == "dump"
    assert deadpool("status", "--verdict", str(first)).returncode == 75
    end = reached + 5
    again = ("--resume", str(first))
    with Run(tmp_path / "second", "--iterations", str(end), spares=0, options=again) as run:
        final = run.wait_end()
    assert final["roles"]["1"]["sha256"] == expected_sha256(1, end)
    assert deadpool("status", "--verdict", str(tmp_path / "second")).returncode == 0
