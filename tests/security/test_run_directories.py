"""Run directories of other users: no command trusts them."""

import os

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli import demo
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import node_agent, scripts
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo, write_json
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import auth
from tests.security.users import ATTACKER, common_directory, given_to, needs_root

SIZE = ("--nodes", "1", "--nproc-per-node", "1")
COMMANDS = {
    "status": ("status", "DIR"),
    "verdict": ("status", "DIR", "--verdict"),
    "drain": ("drain", "DIR", "--node", "0"),
    "protect": ("protect", "DIR", "--every", "2"),
    "kill --node": ("kill", "DIR", "--node", "0"),
    "kill --role": ("kill", "DIR", "--role", "0"),
    "stop": ("stop", "DIR"),
    "stop --wait": ("stop", "DIR", "--wait", "1"),
    "persist": ("persist", "DIR"),
    "verify": ("verify", "DIR"),
    "clean": ("clean", "DIR", "--force"),
    "agent --attach": ("agent", "--run-dir", "DIR", "--attach"),
    "agent --node-id": ("agent", "--run-dir", "DIR", "--node-id", "0"),
    "standby": (
        *("standby", "--run-dir", "DIR", "--node-id", "0", "--host", "127.0.0.1"),
        *("--port", "0"),
    ),
    "run": ("run", "--run-dir", "DIR", *SIZE, "--", "-m", "deadpool_megatron.trainer"),
    "run --resume": (
        *("run", "--run-dir", "NEW", "--resume", "DIR", *SIZE),
        *("--", "-m", "deadpool_megatron.trainer"),
    ),
    "agent --resume": (
        *("agent", "--run-dir", "NEW", "--node-id", "0", "--resume", "DIR", *SIZE),
        *("--", "-m", "deadpool_megatron.trainer"),
    ),
}


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that exists once something has been imported for the command of a run directory."""
    path = tmp_path / "marker"

    def imported(*_: object) -> None:
        path.touch()
        raise CommandError("this is as far as a test goes")

    monkeypatch.setattr(node_agent, "preload_modules", imported)
    return path


@pytest.fixture
def planted(tmp_path):
    """A run directory that names a script in it."""
    path = tmp_path / "planted"
    path.mkdir()
    (path / "pretrain_gpt.py").touch()
    settings = Settings(start_method="fork", connect_seconds=0.5, spare_timeout_seconds=1.0)
    command = ("-m", scripts.MODULE, str(path / "pretrain_gpt.py"), "--deadpool")
    assert RunDirectory(path).create(RunInfo("0123abcd", 1, 1, 0, 1, command, settings))
    return path


@needs_root
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_the_directory(name, planted, marker, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv(auth.ENVIRONMENT_NAME, "0" * 32)
    monkeypatch.setattr(os, "umask", lambda mask: 0o022)
    given_to(ATTACKER, planted)
    places = {"DIR": str(planted), "NEW": str(tmp_path / "new")}
    assert cli.main([places.get(word, word) for word in COMMANDS[name]]) == 2
    text = capfd.readouterr().err
    assert f"belongs to user {ATTACKER}" in text
    assert text.count("\n") == 1
    assert not marker.exists()
    assert sorted(path.name for path in planted.iterdir()).count("launcher.lock") == 0


def test_agent_needs_the_secret_before_it_imports(planted, marker, capfd, monkeypatch):
    """In an own directory too, as others may have been allowed to write a run there."""
    monkeypatch.setattr(os, "umask", lambda mask: 0o022)
    monkeypatch.delenv(auth.ENVIRONMENT_NAME, raising=False)
    assert cli.main(["agent", "--run-dir", str(planted), "--attach", "--host", "127.0.0.1"]) == 2
    assert "no run secret" in capfd.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("mask", [0, 0o002, 0o027])
def test_run_files_are_closed_to_writers_under_any_umask(tmp_path, mask):
    """Readers are those that the umask allows, in a directory that the user has opened."""
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.path.chmod(0o755)
    before = os.umask(mask)
    try:
        assert run.create(RunInfo("0123abcd", 1, 1, 0, 1, ("x.py",), Settings()))
        run.journal.rmdir()
        journal = Journal(run.journal)  # which may be outside the run directory
        journal.write("epoch", 1, {})
        journal.write_heartbeat("1 1")
        write_json(run.coordinator, {})
        write_json(run.node(0), {})
    finally:
        os.umask(before)
    modes = {path: path.stat().st_mode & 0o777 for path in run.path.rglob("*")}
    assert not {path: oct(mode) for path, mode in modes.items() if mode & 0o022}
    assert modes[run.journal] == 0o755 & ~mask
    assert modes[run.node(0)] == 0o644 & ~mask
    assert run.read_run().run_id == "0123abcd"


@pytest.mark.parametrize("name", ["journal", "nodes"])
def test_status_refuses_a_directory_with_a_part_that_others_can_write(planted, name, capfd):
    (planted / name).chmod(0o775)
    assert cli.main(["status", str(planted)]) == 2
    text = capfd.readouterr().err
    assert f"{planted / name} can be written by others" in text
    assert "chmod go-w" in text


def test_agent_warns_of_others_that_could_replace_the_directory(marker, capfd, monkeypatch):
    """A team's directory is no reason to refuse: a line warns of it."""
    monkeypatch.setattr(os, "umask", lambda mask: 0o022)
    monkeypatch.setenv(auth.ENVIRONMENT_NAME, "0" * 32)
    with common_directory() as common:
        team = common / "team"
        team.mkdir()
        team.chmod(0o2775)
        run = RunDirectory(team / "run")
        command = ("-m", "deadpool_megatron.trainer")
        assert run.create(RunInfo("0123abcd", 1, 1, 0, 1, command, Settings()))
        command_line = ["agent", "--run-dir", str(run.path), "--attach", "--host", "127.0.0.1"]
        assert cli.main(command_line) == 2
        line, end = capfd.readouterr().err.splitlines()
        assert line.startswith(f"others, who may write to {team} (chmod +t")
        assert line.endswith(f"can put another directory in place of {run.path} (docs/security.md)")
        assert "this is as far as a test goes" in end
        assert marker.exists()
        cli.main(["check", "--runs", str(team)])
        assert capfd.readouterr().err.count(f"who may write to {team} ") == 1


@pytest.mark.parametrize(("given", "found"), [(None, 0o077), ("027", 0o027), ("0", 0)])
def test_umask_of_a_run_is_private_unless_set(given, found, monkeypatch):
    if given is None:
        monkeypatch.delenv(cli.UMASK_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(cli.UMASK_VARIABLE, given)
    masks: list[int] = []
    monkeypatch.setattr(demo, "run", lambda args: masks.append(os.umask(0o022)) or 0)
    before = os.umask(0o022)
    try:
        assert cli.main(["demo"]) == 0
    finally:
        os.umask(before)
    assert masks == [found]
