"""scripts/walk.py: what it counts, in notes that are made up, and in one run of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import walk  # noqa: E402


def test_each_walk_is_counted_by_its_own_time() -> None:
    steps = [float(second) for second in range(100, 112)]
    entered = [("entered", at + 0.5, "1 1", "each.py") for at in steps]
    entered += [("entered", at, "1 1", "beat.py") for at in (104.1, 108.1, 112.1)]
    entered += [("entered", at, "2 1", "old.py") for at in (90.0, 112.5)]
    entered += [("entered", at, "2 1", "late.py") for at in (106.0, 113.5)]
    called = [("called", 110.0 + n / 99, "3 7", f"{name}.py") for n, name in enumerate("abbacb")]
    called += [("called", 110.02, "3 8", "other.py"), ("left", 110.2, "3 7", "a.py")]
    notes = sorted(entered + called, key=lambda note: note[1])
    facts = walk.count(notes, steps, killed=112.0, recovered=113.0)
    assert facts["lost node"]["walk"] == ["old.py"]
    assert facts["iteration"]["walk"] == ["each.py"]
    sealing = facts["sealing"]
    assert sealing["walk"] == ["a.py", "b.py", "a.py", "c.py", "b.py"]
    assert (sealing["stays"], sealing["files"], sealing["returns"]) == (5, 3, 2)


@pytest.mark.slow
@pytest.mark.full
def test_the_walks_of_a_run_are_counted_in_all_its_processes(tmp_path: Path) -> None:
    out = tmp_path / "walk.json"
    command = [sys.executable, str(ROOT / "scripts" / "walk.py"), "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    facts = json.loads(out.read_text())
    lost, iteration = (set(facts[name]["walk"]) for name in ("lost node", "iteration"))
    assert not lost & iteration
    # Of the coordinator; of a member; of a vault. None that a tick also enters.
    assert lost >= {
        "layout/planner.py",
        "comms/store.py",
        "vault/restore.py",
    }
    assert iteration >= {"cluster/machine/machine.py", "hooks/loop.py", "vault/worker.py"}
    assert facts["sealing"]["returns"] > 0
