"""``deadpool status`` and a run directory in which something is damaged or cannot be read."""

import json

import pytest

import deadpool_megatron
from deadpool_megatron.cli.control import status as status_command
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.settings import Settings

FINAL = {"exit_status": 75, "reason": "no spare\x1b[31m", "iterations": 7}


@pytest.fixture
def run(tmp_path):
    directory = run_files.RunDirectory(tmp_path / "run")
    directory.create(run_files.RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings()))
    return directory


def test_the_verdict_is_one_line_in_which_no_character_acts(run, carry_out, monkeypatch):
    status, _, err = carry_out("status", "--verdict", str(run.path))
    assert (status, "has no verdict" in err) == (2, True)
    run.final.write_text(json.dumps(FINAL))
    for arguments in (("status", "--verdict"), ("status",), ("stop", "--wait", "5")):
        status, out, _ = carry_out(*arguments, str(run.path))
        assert status == (75 if "--verdict" in arguments else 0)
        assert out == "over, exit status 75: no spare?[31m; 7 iterations\n"
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert carry_out("status", str(run.path))[1].startswith("\x1b[1;33mover")
    monkeypatch.setenv("NO_COLOR", "1")
    assert carry_out("status", str(run.path))[1].startswith("over")


@pytest.mark.parametrize("text", ['{"exit', "", "{}", "[]", '{"exit_status": "a"}', "[" * 100_000])
def test_a_verdict_that_is_damaged_is_none(run, carry_out, text):
    """Not the status 1 of a training that has failed: it would end a chain of jobs."""
    run.final.write_text(text)
    for arguments in (("status", "--verdict"), ("status",), ("stop", "--wait", "5")):
        status, out, err = carry_out(*arguments, str(run.path))
        assert (status, out) == (2, "")
        assert len(err.splitlines()) == 1
        assert str(run.final) in err


def test_roles_that_do_the_same_are_one_line_and_those_that_are_behind_come_first():
    roles = {
        str(role): {"seat": [role // 8, 0, 0], "iteration": k, "section": "step", "waiting": None}
        for role in range(512)
        for k in [7 if role else 5]
    }
    late, others = status_command.summary_of_roles(roles)
    assert (late.style, "roles 0 (" in late.text) == ("yellow", True)
    assert (others.style, "roles 1-511 " in others.text) == ("", True)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"world_size": 1e999}', "{}"])
def test_a_run_that_is_damaged(run, carry_out, text):
    (run.path / "run.json").write_text(text)
    status, out, err = carry_out("status", str(run.path))
    assert (status, out) == (2, "")
    assert "run.json is damaged" in err


@pytest.mark.parametrize(("version", "told"), [("9.9", ", 9.9"), (None, "")])
def test_a_run_of_another_version_is_not_called_damaged(run, carry_out, version, told):
    values = run_files.read_json(run.path / "run.json")
    assert values.pop("version") == deadpool_megatron.__version__
    values["settings"]["warp_factor"] = 9
    run_files.write_json(
        run.path / "run.json", values if version is None else {**values, "version": version}
    )
    status, out, err = carry_out("status", str(run.path))
    assert (status, out) == (2, "")
    assert f"was written by another version of deadpool{told}: use that one" in err
    assert "warp_factor" in err
    assert "damaged" not in err
