"""``python -m deadpool_megatron.trainer.plain``, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deadpool_megatron.trainer import plain
from deadpool_megatron.trainer.arguments import BadArgumentsError, parse_args
from tests.trainer.layouts import MODEL, losses, train
from tests.trainer.ranks import run_ranks


@pytest.mark.slow
@pytest.mark.full
def test_a_run_writes_its_facts(text: str, tmp_path: Path) -> None:
    out = tmp_path / "final.json"
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-m", "deadpool_megatron.trainer.plain", *MODEL.split()]
    done = subprocess.run(
        [*command, *text.split(), "--out", str(out)],
        env={**os.environ, **rank},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
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


def test_bad_use_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit, match="2"):
        plain.main(MODEL.split())
    told = capsys.readouterr().err
    assert "WORLD_SIZE' is not set: start the ranks with torchrun" in told
    assert told.count("\n") == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit, match="2"):
        plain.main(["--out", "/no/such/folder/facts.json"])
    assert "--out: no such folder: /no/such/folder (see --help)" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit, match="2"):
        plain.main(["--pipeline-model-parallel-size", "2"])
    assert "3 ranks do not divide" in capsys.readouterr().err


@pytest.mark.parametrize("tracker", [None, "4"], ids=["nothing", "removed"])
def test_nothing_to_load_is_not_a_start_from_nothing(tmp_path: Path, tracker: str | None) -> None:
    if tracker is not None:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    config = parse_args(["--load", str(tmp_path)])
    with pytest.raises(BadArgumentsError, match=f"--load: {tmp_path} names no checkpoint"):
        plain.train(config)
