"""``python -m deadpool_megatron.trainer.plain``, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.layouts import MODEL, losses, train
from tests.trainer.ranks import run_ranks


def start(arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deadpool_megatron.trainer.plain", *arguments.split()]
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        command,
        env={**variables, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_run_writes_its_facts(text: str, tmp_path: Path) -> None:
    out = tmp_path / "final.json"
    done = start(
        f"{MODEL} {text} --out {out}",
        RANK="0",
        WORLD_SIZE="1",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    assert done.returncode == 0, done.stderr
    assert [line.split(" |")[0] for line in done.stdout.splitlines()] == [
        "iteration 3/6",
        "iteration 6/6",
    ]
    facts = json.loads(out.read_text())
    assert len(losses(facts)) == facts["iterations"] == 6
    assert facts["samples"] == 48
    (forked,) = run_ranks(1, train, f"{MODEL} {text}")
    assert facts["hashes"] == forked["hashes"], "a fork and a fresh process train the same"


def test_bad_use_costs_one_line() -> None:
    missing = start(MODEL)
    assert missing.returncode == 2
    assert "WORLD_SIZE' is not set: start the ranks with torchrun" in missing.stderr
    assert missing.stderr.count("\n") == 1
    wrong = start("--pipeline-model-parallel-size 2", WORLD_SIZE="3")
    assert wrong.returncode == 2
    assert "3 ranks do not divide" in wrong.stderr
