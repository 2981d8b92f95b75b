"""Protection changes nothing: a protected run ends in the very bits of stock Megatron and gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.common.ports import free_port
from tests.faults.harness import layouts
from tests.faults.harness.jobs import MODEL, Layout, reference

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
ITERATIONS = 12


def run_plain(folder: Path, layout: Layout) -> dict[str, Any]:
    """The same training by ``trainer.plain``: no seam, no vaults, no hooks."""
    port = free_port()
    out = folder / "plain.json"
    ranks = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "deadpool_megatron.trainer.plain"),
                *(*MODEL.split(), *layout.flags.split()),
                *("--train-iters", str(ITERATIONS), "--out", str(out)),
            ],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(layout.roles),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.DEVNULL,
        )
        for rank in range(layout.roles)
    ]
    try:
        statuses = [process.wait(timeout=180) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert statuses == [0] * layout.roles
    facts: dict[str, Any] = json.loads(out.read_text())
    return facts


@pytest.mark.parametrize("layout", [layouts.PP2_DP2], ids=lambda layout: layout.name)
def test_protected_run_equals_stock_run(tmp_path: Path, layout: Layout) -> None:
    wanted = run_plain(tmp_path, layout)
    protected = reference(layout, ITERATIONS).final
    assert [step["loss"] for step in protected["steps"]] == [
        step["loss"] for step in wanted["steps"]
    ]
    assert [step["grad_norm"] for step in protected["steps"]] == [
        step["grad_norm"] for step in wanted["steps"]
    ]
    assert [protected["roles"][str(role)]["sha256"] for role in range(layout.roles)] == wanted[
        "hashes"
    ]
