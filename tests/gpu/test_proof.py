"""The proof kit of scripts/gpu: rehearsed on the CPU, and for real where a CUDA device is found."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.common import gpus

PROVE = Path(__file__).parents[2] / "scripts" / "gpu" / "prove.sh"
PARTS = ("seam", "losses", "trainer", "pretrain", "copies", "overhead", "kernels")


def prove(out: Path, commit: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the kit as a user does; its results say that they are of this commit."""
    environment = gpus.shown() | {"DEADPOOL_PROOF_COMMIT": commit}
    command = [str(PROVE), "--out", str(out), *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def results(out: Path, device: str) -> Mapping[str, Any]:
    """What each part found, by its name."""
    paths = out.glob(f"*-{device}.json")
    return {value["part"]: value for value in (json.loads(path.read_text()) for path in paths)}


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.timeout(900)  # two minutes on two idle cores, more than five on busy ones
def test_all_parts_pass_in_a_rehearsal_and_are_run_once_for_a_commit(tmp_path: Path) -> None:
    rehearsal = ("--device", "cpu")
    done = prove(tmp_path, "one", *rehearsal)
    found = results(tmp_path, "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert found.keys() == set(PARTS)
    # No checkout of Megatron-LM was given: that is said, and another run looks again.
    assert {name for name, value in found.items() if not value["passed"]} == {"pretrain"}
    assert "no checkout" in done.stdout
    assert found["seam"]["facts"]["kills"] == 2
    # Who was lost while communicators were made was replaced in an epoch more.
    assert found["losses"]["facts"]["rebuild"]["epochs"] == 2
    assert len(found["trainer"]["facts"]["recoveries"]) == 2
    overhead = found["overhead"]["facts"]
    assert overhead["protected"]["runs"][0]["shipped_bytes"] > 0
    assert (
        overhead["plain"]["runs"][0]["committed"]
        <= 4
        < overhead["protected"]["runs"][0]["committed"]
    )
    again = prove(tmp_path, "one", *rehearsal)
    assert again.stdout.count("there already") == len(PARTS) - 1
    # A result of another commit proves nothing; one that says why it failed is seen.
    path = tmp_path / "kernels-cpu.json"
    failed = found["kernels"] | {"passed": False, "problems": ["other bits"]}
    path.write_text(json.dumps(failed))
    seen = prove(tmp_path, "one", *rehearsal, "--part", "kernels")
    assert seen.returncode == 1
    assert "other bits" in seen.stdout
    anew = prove(tmp_path, "two", *rehearsal, "--part", "kernels")
    assert anew.returncode == 0, anew.stdout + anew.stderr
    assert results(tmp_path, "cpu")["kernels"]["commit"] == "two"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_all_parts_pass_on_this_machine_s_gpus(tmp_path: Path) -> None:
    done = prove(tmp_path, "this")
    assert done.returncode == 0, done.stdout + done.stderr
    assert results(tmp_path, "cuda").keys() == set(PARTS)
