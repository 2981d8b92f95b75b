"""Somebody else removes names in shared memory while the run goes on; then something fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_megatron.cluster.run_directory.directory import RunDirectory, segment_root
from tests.faults.harness import layouts
from tests.faults.harness.jobs import (
    assert_unnoticed,
    fault,
    recomputed,
    reference,
    restart_kinds,
    run_job,
)

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
LAYOUT = layouts.PP2_DP2
ITERATIONS = 12


@pytest.mark.parametrize(
    ("removed", "victim"),
    [
        ("*", "--role"),
        pytest.param("*", "--node", marks=pytest.mark.full),
        pytest.param("vault.sock", "--role", marks=pytest.mark.full),
    ],
)
def test_a_failure_after_a_clean_up_is_got_over(tmp_path: Path, removed: str, victim: str) -> None:
    """As by logind with RemoveIPC, or by a cleaner of sockets; the failure comes at once."""
    directory = tmp_path / "run"
    held = fault("held", "backward", when_role=1, when_iteration=5, signal="STOP")

    def clean_and_kill() -> None:
        root = segment_root(RunDirectory(directory).read_run().run_id)
        if removed == "*":
            shutil.rmtree(root)
        for path in root.glob(f"*/{removed}"):
            path.unlink()
        command = [sys.executable, "-m", "deadpool_megatron", "kill", str(directory), victim, "1"]
        subprocess.run(command, check=True, timeout=60)

    patient = "--deadpool-freeze-seconds 60 --deadpool-node-silence-seconds 60"
    patient += " --deadpool-rejoin-seconds 60"
    options = {"spares": 1, "settings": patient, "when_stepping": (4, clean_and_kill)}
    outcome = run_job(directory, LAYOUT, ITERATIONS, [held], **options)
    assert_unnoticed(outcome, reference(LAYOUT, ITERATIONS), [held])
    assert restart_kinds(outcome)[1:] == ["memory"], outcome.story()
    assert max(recomputed(outcome)) <= 1
    assert "were removed, by RemoveIPC of systemd-logind" in outcome.output
