"""``deadpool status`` and a run directory in which something is damaged or cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import deadpool_megatron
from deadpool_megatron.cli.control import status
from deadpool_megatron.cluster.journal.journal import open_journal
from deadpool_megatron.cluster.run_directory.directory import (
    RunDirectory,
    RunInfo,
    read_json,
    write_json,
)
from deadpool_megatron.settings import Settings
from tests.cli.told import CarryOut, Complain

FINAL = {"exit_status": 75, "reason": "no spare\x1b[31m", "iterations": 7}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create(RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings(), "/dev/shm/none"))
    return directory


def test_the_verdict_is_one_line_in_which_no_character_acts(
    run: RunDirectory, carry_out: CarryOut
) -> None:
    run.final.write_text(json.dumps(FINAL))
    for arguments in (("status", "--verdict"), ("status",), ("stop", "--wait", "5")):
        status, out, _ = carry_out(*arguments, str(run.path))
        assert status == (75 if "--verdict" in arguments else 0)
        assert out == "over, exit status 75: no spare?[31m; 7 iterations\n"


@pytest.mark.parametrize("text", ['{"exit', "", "{}", "[]", '{"exit_status": "a"}', "[" * 100_000])
def test_a_verdict_that_is_damaged_is_none(
    run: RunDirectory, carry_out: CarryOut, text: str
) -> None:
    """Not the status 1 of a training that has failed: it would end a chain of jobs."""
    run.final.write_text(text)
    for arguments in (("status", "--verdict"), ("status",), ("stop", "--wait", "5")):
        status, out, err = carry_out(*arguments, str(run.path))
        assert (status, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert str(run.final) in err


@pytest.mark.parametrize("text", ["[" * 100_000, '{"world_size": 1e999}', "{}"])
def test_a_run_that_is_damaged(run: RunDirectory, carry_out: CarryOut, text: str) -> None:
    (run.path / "run.json").write_text(text)
    status, out, err = carry_out("status", str(run.path))
    assert (status, out) == (2, "")
    assert "run.json is damaged" in err


@pytest.mark.parametrize(("version", "told"), [("9.9", ", 9.9"), (None, "")])
def test_a_run_of_another_version_is_not_called_damaged(
    run: RunDirectory, carry_out: CarryOut, version: str | None, told: str
) -> None:
    values = read_json(run.path / "run.json")
    assert values.pop("version") == deadpool_megatron.__version__
    values["settings"]["warp_factor"] = 9
    write_json(run.path / "run.json", values if version is None else {**values, "version": version})
    status, out, err = carry_out("status", str(run.path))
    assert (status, out) == (2, "")
    assert f"was written by another version of deadpool{told}: use that one" in err
    assert "warp_factor" in err
    assert "damaged" not in err


def test_values_of_other_files_that_nobody_wrote(run: RunDirectory, carry_out: CarryOut) -> None:
    run.coordinator.write_text('{"host": "127.0.0.1", "port": 1e999}')
    run.node(0).write_text('{"agent": 1, "started": {"a": 1}}')
    run.node(1).write_text('{"agent": null}')
    run.node(2).write_text('{"hostname": "elsewhere"}')
    assert run.node_listings() == {}
    open_journal(Settings(), "0123abcd", run.journal).write("term", 1, {})
    status, _, err = carry_out("status", str(run.path))
    assert (status, len(err.splitlines())) == (2, 1)


def test_a_status_of_another_version_is_told_in_a_line(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, complain: Complain, carry_out: CarryOut
) -> None:
    """The package was renewed under a run that goes on."""
    known = {"phase": "running", "waiting_for": "", "epoch": 3}
    monkeypatch.setattr(status, "ask", lambda *_: {"status": known})
    assert "another version" in complain("status", run.path)
    answer, out, _ = carry_out("status", run.path, "--json")
    assert (answer, json.loads(out)) == (0, known)
